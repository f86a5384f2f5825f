"""A damaged checkpoint is rejected by name and set aside, and the one before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from durability.checkpoint_helpers import FILES, trained
from durability.test_old_files import RUNS
from gem_api.checkpoint import TENSORS
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, log_cli, recovery
from gem_server.durability.checkpoint import BadCheckpoint, list_checkpoints, newest, restore
from gem_server.durability.state import encoded, state_of
from kit.core import ONES, bits, commit, make_core, save_core, start, write_file

pytestmark = pytest.mark.usefixtures("quick_disk")


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


def replace(name: str, old: bytes, new: bytes) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        content = (path / name).read_bytes()
        assert old in content
        (path / name).write_bytes(content.replace(old, new))

    return damage


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def pipe(name: str) -> Callable[[Path], object]:
    """Opening it waits for a writer, who never comes."""

    def damage(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"{name} is missing": (remove(name), name) for name in FILES},
    **{f"{name} is truncated": (truncate(name, 50), name) for name in FILES},
    **{f"{name} is empty": (truncate(name, 0), name) for name in FILES},
    **{f"{name} is longer": (grow(name), name) for name in FILES},
    **{f"{name} has a flipped bit {where}": (flip(name, at), name)
       for name in FILES[:2] for where, at in {"in its length": 0, "in its header": 20, "at its end": -1}.items()},
    "state.json has another figure": (replace("state.json", b'"version": 7', b'"version": 3'), "state.json"),
    "state.json is garbage": (text("state.json", b"\x00garbage{"), "state.json"),
    "state.json is not UTF-8": (text("state.json", b"\xff\xfe"), "state.json"),
    "state.json is a list": (text("state.json", b"[]"), "state.json"),
    "state.json is null": (text("state.json", b"null"), "state.json"),
    "state.json is a pipe": (pipe("state.json"), "state.json"),
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


def test_buffers_of_another_size_are_refused_when_they_are_restored(tmp_path: Path) -> None:
    path = save_core(trained(), tmp_path)
    state = checkpoint.read_state(path)
    short = {f"lease-{n}/{name}": np.zeros(3, np.float32) for n in (1, 2) for name in ("moment", "snapshot")}
    (path / "workers.safetensors").unlink()
    write_file(path / "workers.safetensors", short, {})
    with pytest.raises(BadCheckpoint, match="another shape"):
        restore(path, state, make_core(), 0.0)


def test_a_folder_of_refused_checkpoints_alone_is_no_new_run(tmp_path: Path) -> None:
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
    """It is set aside, and not tried again. Then the run came to the same version, and again its checkpoint was damaged."""
    older, newer, _ = two(tmp_path)
    for suffix in (".refused", ".refused-2"):
        truncate("model.safetensors", 10)(newer)
        latest = newest(tmp_path, lambda path, why: None)
        assert latest is not None
        assert latest[0] == older
        assert list_checkpoints(tmp_path) == [older]
        assert (tmp_path / f"{newer.name}{suffix}").is_dir()
        assert newest(tmp_path, lambda path, why: pytest.fail(why)) is not None
        newer = save_core(trained(commits=7), tmp_path)


DAMAGED_STATES = [
    "[" * 200_000,
    '{"log": ["a", 2]}',
    '{"log": {"a": 1, "b": 2}}',
    '{"log": [1e999, 1]}',
    '{"log": [-5, -1]}',
    "[]",
]


@pytest.mark.parametrize("content", DAMAGED_STATES, ids=lambda content: content[:20])
def test_a_damaged_older_checkpoint_stops_neither_a_start_nor_a_check(content: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUNS[0] / "run", tmp_path / "run"))
    before = recovery.next_serial(run)
    older = run / "checkpoint-000000000000-0009"
    older.mkdir()
    (older / "state.json").write_text(content)
    assert recovery.log_position_of(older) == recovery.UNREADABLE
    assert recovery.next_serial(run) == before
    done = CliRunner().invoke(log_cli.main, ["verify", str(run)])
    assert done.exit_code == 0, done.exception
    assert f"{older.name}  can't be read: " in done.stdout


@pytest.mark.parametrize(
    ("change", "of_a_lease"),
    [({"progress": 1.5}, {}), ({"progress": -0.5}, {}), ({"rounds": float("nan")}, {}), ({"rounds": 1.5}, {})]
    + [({}, {name: value}) for name in ("progress", "reply_progress", "spare_progress") for value in (1.5, float("nan"))],
)
def test_a_state_that_has_counted_more_than_its_commits_is_not_understood(
    change: dict[str, float], of_a_lease: dict[str, float]
) -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES)
    files = {name: {"bytes": 0, "sha256": ""} for name in TENSORS}
    state = {**vars(checkpoint.capture(core).state), "files": files, "sha256": ""}
    whole = json.loads(json.dumps(state, default=encoded))
    state_of(whole)
    (lease,) = whole["leases"]
    with pytest.raises(ValueError, match=r"state\.progress is"):
        state_of({**whole, **change, "leases": [{**lease, **of_a_lease}]})


def test_a_lease_of_an_older_checkpoint_got_its_reply_with_its_last_commit() -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES)
    files = {name: {"bytes": 0, "sha256": ""} for name in TENSORS}
    whole = json.loads(json.dumps({**vars(checkpoint.capture(core).state), "files": files, "sha256": ""}, default=encoded))
    del whole["leases"][0]["reply_progress"]
    assert state_of(whole).leases[0].reply_progress == 1.0
