"""Checkpoints hold the whole run, bit by bit, or do not appear. A damaged one is rejected by name, and the one before it
used."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import SMALL, bits, commit, header, make_core, save_core, start, write_file
from gem_api.hyperparameters import SHARD_MODES, SNAPSHOTS, Hyperparameters
from gem_api.layout import Layout
from gem_server.core.facts import Admission, Applied
from gem_server.core.shards import NoShard, Shard
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint
from gem_server.durability.capture import copies_at_most
from gem_server.durability.checkpoint import BadCheckpoint, capture, list_checkpoints, newest, restore, write
from gem_server.durability.scratch import Scratch
from gem_server.rules import RULES
from gem_server.rules.proxies import PROXIES
from live import DEADLINE
from safetensors.numpy import load_file, save

WORKERS = ["ann", "bob"]
FILES = ["model.safetensors", "workers.safetensors", "state.json"]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives the test: it need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "fdatasync", lambda handle: None)


def trained(settings: Hyperparameters | None = None, layout: Layout = SMALL, commits: int = 5) -> Core:
    """A core in the middle of a run: commits, a shard done, two held, one returned, a lease that has ended."""
    core = make_core(settings)
    random = np.random.default_rng(1)
    leases = start(core, [*WORKERS, "cy"], layout, random.normal(size=layout.size))
    for number in range(commits):
        lease_id = leases[number % 2]
        sequence = core.leases.get(lease_id).sequence + 1
        commit(core, lease_id, sequence, random.normal(size=layout.size), loss=0.5 / (number + 1), samples=32)
    for lease_id in (leases[0], leases[0], leases[1], leases[2]):
        core.lease_shard(lease_id, 1000, 0.0)
    core.complete_shard(leases[0], 1, 0.0)
    core.leave(leases[2])
    core.admit(header(core, leases[0], core.leases.get(leases[0]).sequence), 0.0)  # a repeat, to be counted
    return core


def restored(directory: Path, settings: Hyperparameters | None = None) -> Core:
    """The core that the newest whole checkpoint holds; none may be refused on the way."""

    def refuse(path: Path, why: str) -> None:
        raise AssertionError(f"{path} was refused: {why}")

    latest = newest(directory, refuse)
    assert latest is not None
    core = make_core(settings, first_id=100)
    restore(*latest, core, now=0.0)
    return core


def answers(core: Core) -> dict[str, Any]:
    return {lease_id: plain(lease.last_applied) for lease_id, lease in core.leases.live.items()}


def plain(applied: Applied | None) -> dict[str, Any] | None:
    """An answer with its arrays as lists, to be compared."""
    if applied is None:
        return None
    pi = vars(applied.pi).items() if applied.pi else ()
    return {**vars(applied), "pi": {name: np.asarray(value).tolist() for name, value in pi}}


# -- a round trip

SETTINGS = [
    *(Hyperparameters(snapshot=snapshot, shards=mode) for snapshot in SNAPSHOTS for mode in SHARD_MODES),
    *(Hyperparameters(rule=rule) for rule in RULES if rule != "gem"),
    *(Hyperparameters(rule_options=f"proxy={proxy}") for proxy in PROXIES if proxy != "momentum"),
    Hyperparameters(rule="dcasgd", rule_options="mean_square=0.95"),
    Hyperparameters(rule="fedbuff", rule_options="buffer_size=4"),
    Hyperparameters(rule="diloco", rule_options="delay=3 eager=0.1"),
    Hyperparameters(rule="ringmaster", rule_options="threshold=1"),
]
EVERY_RULE = pytest.mark.parametrize("settings", SETTINGS, ids=lambda h: f"{h.rule} {h.rule_options}-{h.snapshot}-{h.shards}")


@EVERY_RULE
def test_a_restored_core_is_the_one_that_was_written_bit_by_bit(settings: Hyperparameters, tmp_path: Path) -> None:
    core = trained(settings)
    save_core(core, tmp_path)
    again = restored(tmp_path, settings)
    assert bits(again.central.theta) == bits(core.central.theta)
    assert again.central.initialized
    assert again.central.layout == core.central.layout
    for name in ("version", "size", "initializer"):
        assert getattr(again.central, name) == getattr(core.central, name)
    assert again.memory.held == core.memory.held
    for name in ("next_ticket", "outcomes", "steps_done", "samples_committed"):
        assert getattr(again, name) == getattr(core, name)
    assert again.shared.numbers == core.shared.numbers
    assert {name: bits(buffer) for name, buffer in again.shared.buffers.items()} == {
        name: bits(buffer) for name, buffer in core.shared.buffers.items()
    }
    assert again.leases.ended == core.leases.ended
    assert list(again.leases.live) == list(core.leases.live)
    for lease_id, lease in core.leases.live.items():
        other = again.leases.get(lease_id)
        for name in ("worker", "sequence", "base_version", "queued", "lease_id"):
            assert getattr(other, name) == getattr(lease, name)
        assert {name: bits(buffer) for name, buffer in other.buffers.items()} == {
            name: bits(buffer) for name, buffer in lease.buffers.items()
        }
        assert bits(again.reply(other)) == bits(core.reply(lease))
    assert answers(again) == answers(core)
    assert again.ledger.held == core.ledger.held
    assert {group: vars(deck) for group, deck in again.ledger.decks.items()} == {
        group: vars(deck) for group, deck in core.ledger.decks.items()
    }
    assert (again.ledger.completed, again.ledger.samples_completed) == (core.ledger.completed, core.ledger.samples_completed)


def test_steps_are_counted_for_the_names_that_committed_last_also_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that never ends meets new names without end; a restart must forget the same ones as the run would have."""
    monkeypatch.setattr("gem_server.core.state_machine.MAX_COUNTED_NAMES", 3)
    core = make_core()
    start(core, ["ann"])
    for worker in ("ann", "bob", "cy", "ann", "dora", "cy"):
        commit(core, core.register(worker, SMALL, 0.0).lease_id, 1, 1.0)
    assert core.steps_done == {"ann": 2, "dora": 1, "cy": 2}
    save_core(core, tmp_path)
    for each in (core, restored(tmp_path)):
        commit(each, each.register("eve", SMALL, 0.0).lease_id, 1, 1.0)
        assert list(each.steps_done) == ["dora", "cy", "eve"]


@EVERY_RULE
def test_a_restored_run_goes_on_as_if_nothing_had_happened(settings: Hyperparameters, tmp_path: Path) -> None:
    """The same commits after it give the same bits."""
    core = trained(settings)
    save_core(core, tmp_path)
    again = restored(tmp_path, settings)
    random = np.random.default_rng(2)
    for number in range(30):
        gradient = random.normal(size=SMALL.size)
        lease_id = f"lease-{number % 2 + 1}"
        sequence = core.leases.get(lease_id).sequence + 1
        one, other = (commit(run, lease_id, sequence, gradient) for run in (core, again))
        assert plain(one) == plain(other)
        assert bits(core.central.theta) == bits(again.central.theta)


def test_a_worker_whose_reply_was_lost_in_the_crash_gets_its_first_answer(tmp_path: Path) -> None:
    core = trained()
    save_core(core, tmp_path)
    again = restored(tmp_path)
    for lease_id, lease in core.leases.live.items():
        admission, other = again.admit(header(core, lease_id, lease.sequence), 0.0)
        assert admission is Admission.REPEATED
        assert plain(other.last_applied) == plain(lease.last_applied)
        assert bits(again.reply(other)) == bits(core.reply(lease))
    assert again.central.version == core.central.version


def test_shards_held_at_the_checkpoint_are_still_held_and_go_back_when_the_lease_ends(tmp_path: Path) -> None:
    settings = Hyperparameters(shard_size=500, epochs=1)
    core = make_core(settings)
    ann, bob = start(core, WORKERS)
    core.lease_shard(ann, 1000, 0.0)
    core.lease_shard(bob, 1000, 0.0)
    save_core(core, tmp_path)
    again = restored(tmp_path, settings)
    assert again.lease_shard(ann, 1000, 0.0, holding={1}) == NoShard(complete=False)
    assert again.complete_shard(ann, 1, 0.0)
    again.leave(bob)
    shard = again.lease_shard(ann, 1000, 0.0)
    assert isinstance(shard, Shard)
    assert (shard.begin, shard.end) == (500, 1000)


def test_restored_leases_live_for_a_full_duration_from_the_restart(tmp_path: Path) -> None:
    save_core(trained(), tmp_path)
    latest = newest(tmp_path, lambda path, why: None)
    assert latest is not None
    core = make_core()
    restore(*latest, core, now=1000.0)
    assert core.expire(1059.9) == []
    assert len(core.expire(1060.0)) == 2


def test_a_run_without_workers_is_kept_too(tmp_path: Path) -> None:
    core = trained()
    for lease_id in list(core.leases.live):
        core.leave(lease_id)
    save_core(core, tmp_path)
    again = restored(tmp_path)
    assert bits(again.central.theta) == bits(core.central.theta)
    assert again.register("ann", SMALL, 0.0).steps_done == 3


@pytest.mark.parametrize("name", ["ключ", 'quo"te', "a/b", "lease-1/moment", " "])
def test_any_tensor_name_that_a_layout_takes_can_be_kept(name: str, tmp_path: Path) -> None:
    core = trained(layout=Layout.of({name: (2, 3), "bias": (3,), "empty": (0,), "scalar": ()}))
    save_core(core, tmp_path)
    assert bits(restored(tmp_path).central.theta) == bits(core.central.theta)


def test_a_run_whose_losses_are_no_numbers_can_be_kept(tmp_path: Path) -> None:
    core = trained()
    commit(core, "lease-1", 4, 1.0, loss=float("nan"))
    commit(core, "lease-2", 3, 1.0, loss=float("inf"))
    save_core(core, tmp_path)
    again = restored(tmp_path)
    assert str([again.leases.get(lease_id).last_applied.loss for lease_id in ("lease-1", "lease-2")]) == "[nan, inf]"  # type: ignore[union-attr]


@pytest.mark.parametrize("rule_options", ["", "proxy=global", "proxy=yellowfin"])
@pytest.mark.parametrize("ready", [0, 1, 2, 9])
def test_a_checkpoint_is_of_one_moment_however_the_run_goes_on(ready: int, rule_options: str, tmp_path: Path) -> None:
    """Registering, leaving, commits and pulls while it is written change nothing, whether memory was made ready or not."""
    core = trained(Hyperparameters(rule_options=rule_options))
    save_core(core, tmp_path / "before")
    captured = capture(core, scratch=Scratch(SMALL.size).prepare(ready))
    captured.copy_theta()
    commit(core, "lease-2", 3, 1.0)
    core.pull(core.leases.get("lease-1"))
    core.leave("lease-1")
    core.register("dan", SMALL, 0.0)
    core.lease_shard("lease-2", 1000, 0.0)
    write(tmp_path / "after", captured, 3)
    before, after = (next((tmp_path / when).iterdir()) for when in ("before", "after"))
    assert {name: (before / name).read_bytes() for name in FILES} == {name: (after / name).read_bytes() for name in FILES}


def test_copies_that_commits_wait_for_go_to_memory_that_was_made_ready() -> None:
    core = trained()
    scratch = Scratch(SMALL.size).prepare(copies_at_most(core))
    ready = scratch.nbytes
    captured = capture(core, scratch=scratch)
    captured.copy_theta()
    for lease_id, sequence in (("lease-1", 4), ("lease-2", 3)):
        commit(core, lease_id, sequence, 1.0)
    assert ready == scratch.nbytes == 5 * core.central.theta.nbytes  # θ and two workers' m and s


def test_what_is_written_makes_room_for_what_is_copied_next(tmp_path: Path) -> None:
    core = trained()
    scratch = Scratch(SMALL.size)
    captured = capture(core, scratch=scratch)
    captured.copy_theta()
    write(tmp_path, captured, 3)  # nobody commits: one worker's buffers are copied and written after the other's
    assert scratch.nbytes == 3 * core.central.theta.nbytes


@pytest.mark.parametrize(("room", "copies"), [(0, 1), (1, 1), (3, 3), (4, 4), (5, 5), (6, 5)])
def test_memory_is_made_ready_within_the_limit_but_for_theta(room: int, copies: int) -> None:
    core = trained()
    core.memory.limit = core.memory.held + room * core.central.theta.nbytes
    assert copies_at_most(core) == copies


def test_a_commit_waits_for_the_disk_where_there_is_no_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = trained()
    core.memory.limit = core.memory.held
    captured = capture(core)
    captured.copy_theta()
    asked, has_room = threading.Event(), captured._has_room
    monkeypatch.setattr(captured, "_has_room", lambda lease: asked.set() or has_room(lease))
    committing = threading.Thread(target=commit, args=(core, "lease-2", 3, 1.0))
    committing.start()
    assert asked.wait(DEADLINE)
    assert core.central.version == 5
    write(tmp_path, captured, 3)
    committing.join(DEADLINE)
    assert core.central.version == 6


# -- the files


def test_other_tools_read_theta_by_tensor_name(tmp_path: Path) -> None:
    core = trained()
    tensors = load_file(save_core(core, tmp_path) / "model.safetensors")
    expected = SMALL.split(core.central.theta)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == expected[name].shape
        assert bits(tensor) == bits(expected[name])


@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "gem_version": "7"}])
def test_the_library_reads_what_our_writer_wrote_as_what_its_own_wrote(metadata: dict[str, str], tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    shapes: list[tuple[int, ...]] = [(3, 5), (), (0,), (1000,), (2, 3, 4)]
    tensors = {f"t{number}": random.normal(size=shape).astype(np.float32) for number, shape in enumerate(shapes)}
    tensors["odd"] = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    written = write_file(ours, tensors, metadata)
    theirs.write_bytes(save(tensors, metadata))
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape, bits(value)) == (other[name].dtype, other[name].shape, bits(other[name]))
    assert written["bytes"] == ours.stat().st_size


def test_tensors_larger_than_a_piece_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_server.durability.tensor_file._PIECE", 100)
    values = np.random.default_rng(4).normal(size=1003).astype(np.float32)
    write_file(tmp_path / "file", {"w": values}, {})
    assert bits(load_file(tmp_path / "file")["w"]) == bits(values)


def test_only_the_owner_can_read_a_checkpoint(tmp_path: Path) -> None:
    """It holds lease ids, which are secrets."""
    old = os.umask(0)
    try:
        path = save_core(trained(), tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == dict.fromkeys(FILES, 0o600)


def test_a_tensor_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", {}, {})
    assert (tmp_path / "file").read_bytes() == b"precious"


# -- which are kept


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    core = trained()
    for sequence in range(4, 9):
        commit(core, "lease-1", sequence, 1.0)
        save_core(core, tmp_path, keep=2)
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["checkpoint-000000000010-0001", "checkpoint-000000000009-0001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names), "nothing else is left"


def test_two_of_one_version_are_told_apart_and_the_later_is_newer(tmp_path: Path) -> None:
    core = trained()
    first = save_core(core, tmp_path)
    core.leave("lease-2")
    second = save_core(core, tmp_path)
    assert list_checkpoints(tmp_path) == [second, first]
    assert list(restored(tmp_path).leases.live) == ["lease-1"]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    strangers = ["checkpoint-1", "checkpoint-000000000001-0001.refused", "notes.txt", "checkpoint-latest"]
    for name in strangers:
        (tmp_path / name).mkdir()
    for _ in range(3):
        save_core(trained(), tmp_path, keep=1)
    assert {path.name for path in tmp_path.iterdir()} >= set(strangers)
    assert len(list_checkpoints(tmp_path)) == 1


def test_an_empty_or_missing_directory_holds_no_checkpoint(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        assert list_checkpoints(directory) == []
        assert newest(directory, lambda path, why: pytest.fail(why)) is None


# -- a write that fails


@pytest.mark.parametrize(
    ("call", "which"),
    [
        *(("fdatasync", number) for number in (1, 2, 3)),
        ("fsync", 1),
        *(("open", number) for number in (1, 2, 3)),
        ("rename", 1),
    ],
)
def test_a_write_that_fails_leaves_nothing_behind_and_the_older_one_stands(
    call: str, which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full at any of its files, or at the last step."""
    core = trained()
    older = save_core(core, tmp_path, keep=1)
    content = {entry.name: entry.read_bytes() for entry in older.iterdir()}
    commit(core, "lease-1", 4, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk(getattr(os, call), which))
        with pytest.raises(OSError, match="No space"):
            save_core(core, tmp_path, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == [older.name]
    assert {entry.name: entry.read_bytes() for entry in older.iterdir()} == content
    assert save_core(core, tmp_path, keep=1).name == "checkpoint-000000000006-0001"


def full_disk(real: Callable[..., Any], which: int) -> Callable[..., Any]:
    """A function of `os` that fails from its `which`th call on; opening a file that is there already still works."""
    calls = 0

    def failing(path: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        opens_existing = real.__name__ == "open" and not arguments[0] & os.O_CREAT
        calls += not opens_existing
        if calls >= which and not opens_existing:
            raise OSError(28, "No space left on device")
        return real(path, *arguments, **options)

    return failing


def test_a_checkpoint_is_on_disk_before_it_appears_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and the folder are synced before the rename, the directory after it."""
    events: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: events.append("sync"))
    monkeypatch.setattr(os, "fdatasync", lambda handle: events.append("sync"))
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths))[1])
    save_core(trained(), tmp_path)
    assert events == ["sync"] * 4 + ["rename", "sync"]


def test_what_a_crash_left_half_written_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    core = trained()
    half = tmp_path / f".writing-{os.getpid()}"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert list_checkpoints(tmp_path) == []
    path = save_core(core, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


# -- a read that fails


def two(directory: Path) -> tuple[Path, Path, Core]:
    """An older and a newer checkpoint, and the core as the older one has it."""
    core = trained(commits=5)
    older = save_core(core, directory)
    further = trained(commits=7)
    newer = save_core(further, directory)
    return older, newer, core


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A state that is another but vouches for itself: what a server of another version may have written."""

    def damage(path: Path) -> None:
        state = json.loads((path / "state.json").read_text())
        change(state)
        state.pop("sha256")
        digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
        (path / "state.json").write_text(json.dumps({**state, "sha256": digest}))

    return damage


def truncate(name: str, size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, size)


def grow(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes() + b"x")


def flip(name: str, place: int) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[place] ^= 1
        (path / name).write_bytes(content)

    return damage


def text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"{name} is missing": (remove(name), name) for name in FILES},
    **{f"{name} is truncated": (truncate(name, 50), name) for name in FILES},
    **{f"{name} is empty": (truncate(name, 0), name) for name in FILES},
    **{f"{name} is longer": (grow(name), name) for name in FILES},
    **{f"{name} has a flipped bit {where}": (flip(name, at), name)
       for name in FILES[:2] for where, at in {"in its length": 0, "in its header": 20, "at its end": -1}.items()},
    "state.json is of another format": (edit(lambda state: state.update(format="gem-checkpoint/2")), "gem-checkpoint/2"),
    "state.json has no format": (edit(lambda state: state.pop("format")), "format"),
    "state.json is garbage": (text("state.json", b"\x00garbage{"), "state.json"),
    "state.json is not UTF-8": (text("state.json", b"\xff\xfe"), "state.json"),
    "state.json is a list": (text("state.json", b"[]"), "state.json"),
    "state.json is null": (text("state.json", b"null"), "state.json"),
    "state.json names no files": (edit(lambda state: state.pop("files")), "files"),
    "state.json has an unknown setting": (edit(lambda state: state["hyperparameters"].update(new=1)), "new"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_used_where(damage: str, tmp_path: Path) -> None:
    spoil, named = DAMAGE[damage]
    older, newer, core = two(tmp_path)
    spoil(newer)
    refused: list[tuple[Path, str]] = []
    latest = newest(tmp_path, lambda path, why: refused.append((path, why)))
    assert latest is not None
    assert latest[0] == older
    ((path, why),) = refused
    assert path == newer
    assert named in why
    again = make_core()
    restore(*latest, again, 0.0)
    assert bits(again.central.theta) == bits(core.central.theta)


def test_a_changed_figure_in_the_state_is_damage_too(tmp_path: Path) -> None:
    """state.json vouches for the other files; something must vouch for it: here a version of 7 becomes 3."""
    older, newer, _ = two(tmp_path)
    content = (newer / "state.json").read_text()
    changed = content.replace('"version": 7', '"version": 3')
    assert changed != content
    (newer / "state.json").write_text(changed)
    latest = newest(tmp_path, lambda path, why: None)
    assert latest is not None
    assert latest[0] == older


MISSING = ["layout", "version", "next_ticket", "outcomes", "ended", "steps_done", "samples_committed", "ledger", "leases"]


@pytest.mark.parametrize("key", MISSING)
def test_a_state_that_lacks_a_part_is_refused_when_it_is_restored(key: str, tmp_path: Path) -> None:
    path = save_core(trained(), tmp_path)
    state = json.loads((path / "state.json").read_text())
    del state[key]
    with pytest.raises(BadCheckpoint, match=key):
        restore(path, state, make_core(), 0.0)


def test_buffers_of_another_size_are_refused_when_they_are_restored(tmp_path: Path) -> None:
    path = save_core(trained(), tmp_path)
    state = json.loads((path / "state.json").read_text())
    short = {f"lease-{n}/{name}": np.zeros(3, np.float32) for n in (1, 2) for name in ("moment", "snapshot")}
    (path / "workers.safetensors").unlink()
    write_file(path / "workers.safetensors", short, {})
    with pytest.raises(BadCheckpoint, match="another shape"):
        restore(path, state, make_core(), 0.0)


def test_a_refused_checkpoint_is_set_aside_and_not_tried_again(tmp_path: Path) -> None:
    older, newer, _ = two(tmp_path)
    truncate("model.safetensors", 10)(newer)
    newest(tmp_path, lambda path, why: None)
    assert list_checkpoints(tmp_path) == [older]
    assert (tmp_path / f"{newer.name}.refused").is_dir()
    assert newest(tmp_path, lambda path, why: pytest.fail(why)) is not None


def test_a_folder_of_refused_checkpoints_alone_is_no_new_runs_however_often_it_is_tried(tmp_path: Path) -> None:
    """A container is started again when it fails; the second start must not take the folder for an empty one."""
    for path in two(tmp_path)[:2]:
        (path / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(BadCheckpoint, match=r"none of the 2 checkpoints .* is complete"):
            newest(tmp_path, lambda path, why: None)
    backup = save_core(trained(commits=7), tmp_path)
    latest = newest(tmp_path, lambda path, why: None)
    assert latest is not None
    assert latest[0] == backup


def test_a_second_damaged_checkpoint_of_the_same_name_is_refused_as_well(tmp_path: Path) -> None:
    """The run came to the same version again, and again its checkpoint was damaged."""
    older, newer, _ = two(tmp_path)
    for _ in range(2):
        truncate("model.safetensors", 10)(newer)
        latest = newest(tmp_path, lambda path, why: None)
        assert latest is not None
        assert latest[0] == older
        newer = save_core(trained(commits=7), tmp_path)


def test_where_none_is_whole_the_server_is_told_so(tmp_path: Path) -> None:
    """Starting anew without a word would throw a run away."""
    refused: list[str] = []
    for path in two(tmp_path)[:2]:
        (path / "state.json").unlink()
    with pytest.raises(BadCheckpoint, match="none of the 2 checkpoints"):
        newest(tmp_path, lambda path, why: refused.append(path.name))
    assert len(refused) == 2


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    state = json.loads((save_core(trained(), tmp_path) / "state.json").read_text())
    assert state["format"] == checkpoint.FORMAT == "gem-checkpoint/1"
    assert state["hyperparameters"]["rule"] == "gem"
    assert set(state["files"]) == set(FILES[:2])
