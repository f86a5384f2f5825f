"""gem-ctl reshard: the checkpoints of a run, cut anew."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gem_api.checkpoint import digest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import Range
from gem_server.core.state_machine import Core
from gem_server.core.values import LeaderRegistration
from gem_server.durability import checkpoint, reshard, reshard_cli
from gem_server.durability.capture import run_buffers
from gem_server.durability.range_files import BadRanges
from gem_server.durability.storage import Storage
from kit.core import bits, commit, make_core, save_core
from safetensors.numpy import load_file

# 3 ranges cut w and v; a scalar, a vector and a tensor without elements lie between.
LAYOUT = Layout.of({"w": (70, 100), "none": (0, 4), "scale": (), "v": (90, 2, 40), "b": (500,)})
ADAM = Hyperparameters(rule="gem", optimizer="adam", shard_size=10, batch_size=10)
SETTINGS = [
    ADAM,
    Hyperparameters(shard_size=10, batch_size=10, average=0.9),
    Hyperparameters(rule="dcasgd", shard_size=10, batch_size=10),
]
NOW = 0.0


def trained(count: int, settings: Hyperparameters = ADAM, layout: Layout = LAYOUT) -> list[Core]:
    """The cores of all ranges of a run with two workers, in the middle of it: one commit has reached range 0 alone."""
    cores = [make_core(settings, part=Range(index, count)) for index in range(count)]
    random = np.random.default_rng(1)
    leases = [_join(cores, name, layout) for name in ("ann", "bob")]
    theta = random.normal(size=layout.parameters).astype(np.float32)
    for core in cores:
        core.require_initializer(leases[0], NOW)
        core.central.theta[:] = _slice(core, theta)
        core.initialized()
        for lease_id in leases:
            core.pull(core.leases.get(lease_id))
    for number in range(6):
        gradient = random.normal(size=layout.parameters).astype(np.float32)
        for core in cores if number < 5 else cores[:1]:
            commit(core, leases[number % 2], number // 2 + 1, _slice(core, gradient), loss=0.5, samples=10)
    done = cores[0].lease_shard(leases[0], 100, NOW)
    cores[0].complete_shard(leases[0], done.shard_id, NOW)  # type: ignore[union-attr]
    for lease_id in leases:
        cores[0].lease_shard(lease_id, 100, NOW)
    return cores


def _join(cores: Sequence[Core], name: str, layout: Layout) -> str:
    lease_id = cores[0].register(name, layout, NOW).lease_id
    for core in cores[1:]:
        core.register(name, layout, NOW, leader=LeaderRegistration(lease_id, cores[0].run_id, cores[0].settings))
    return lease_id


def _slice(core: Core, values: Any) -> Any:
    layout = core.central.layout
    assert layout is not None
    return values[layout.begin : layout.end]


def saved(folder: Path, cores: Sequence[Core]) -> Path:
    """Writes the checkpoint of each range; returns the folder."""
    for core in cores:
        save_core(core, folder if core.part.whole else folder / f"range-{core.part.index}")
    return folder


def cut(source: Path, out: Path, count: int) -> Path:
    reshard.write(reshard.load(source, count), out)
    return out


def content(folder: Path) -> dict[str, bytes]:
    """All files in a folder, by their paths there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resumed(folder: Path, part: Range, settings: Hyperparameters) -> Core:
    """The core that a server starts with."""
    directory = folder if part.whole else folder / f"range-{part.index}"
    core = make_core(settings, part=part)
    found = checkpoint.newest(directory, _refuse)
    assert found is not None
    checkpoint.restore(*found, core, NOW)
    return core


def _refuse(path: Path, why: str) -> None:
    raise AssertionError(f"{path} was refused: {why}")


def joined(cores: Sequence[Core]) -> dict[str, bytes]:
    """θ and the buffers that the run keeps once, of all ranges, each in one piece."""
    names = run_buffers(cores[0])
    buffers = {name: bits(np.concatenate([run_buffers(core)[name] for core in cores])) for name in names}
    return {"θ": bits(np.concatenate([core.central.theta for core in cores])), **buffers}


# -- what is kept


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"{settings.rule}-{settings.optimizer}")
def test_three_ranges_to_two_and_back_are_the_same_bytes(settings: Hyperparameters, tmp_path: Path) -> None:
    three = saved(tmp_path / "three", trained(3, settings))
    again = cut(cut(three, tmp_path / "two", 2), tmp_path / "again", 3)
    assert content(again) == content(cut(three, tmp_path / "at once", 3))
    for index in range(3):
        (before,), (after,) = ((folder / f"range-{index}").glob("checkpoint-*") for folder in (three, again))
        tensors = load_file(before / "workers.safetensors")
        shared = {name: bits(tensor) for name, tensor in tensors.items() if name.startswith("/")}
        assert {name: bits(tensor) for name, tensor in load_file(after / "workers.safetensors").items()} == shared
        ours, theirs = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
        assert {name: bits(tensor) for name, tensor in ours.items()} == {name: bits(tensor) for name, tensor in theirs.items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"{settings.rule}-{settings.optimizer}")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2), (1, 1), (2, 2)])
def test_servers_resume_with_the_same_run(before: int, after: int, settings: Hyperparameters, tmp_path: Path) -> None:
    cores = trained(before, settings)
    source = saved(tmp_path / "in", cores)
    unchanged = content(source)
    out = cut(source, tmp_path / "out", after)
    assert content(source) == unchanged
    restored = [resumed(out, Range(index, after), settings) for index in range(after)]
    assert joined(restored) == joined(cores)
    leader = cores[0]
    for core in restored:
        assert (core.run_id, core.central.version, core.next_ticket) == ("run", leader.central.version, leader.next_ticket)
        assert (core.steps_done, core.samples_committed) == (leader.steps_done, leader.samples_committed)
        assert (core.outcomes, core.leases.live) == (leader.outcomes, {})
        assert core.leases.ended["rolled_back"] == 2  # type: ignore[index]
    _join(restored, "ann", LAYOUT)


def test_the_ledger_goes_on_with_the_leader_and_held_shards_are_dealt_again(tmp_path: Path) -> None:
    out = cut(saved(tmp_path / "in", trained(3)), tmp_path / "out", 2)
    leader, other = (resumed(out, Range(index, 2), ADAM) for index in range(2))
    assert (leader.ledger.completed, leader.ledger.held, leader.ledger.pending) == (1, {}, 9)
    assert (other.ledger.completed, other.ledger.samples) == (0, 0)


def test_the_layout_of_the_files_is_that_of_one_server(tmp_path: Path) -> None:
    out = cut(saved(tmp_path / "in", trained(3)), tmp_path / "out", 1)
    (path,) = out.glob("checkpoint-*")
    assert {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()} == {
        tensor.name: tensor.shape for tensor in LAYOUT.tensors
    }
    assert json.loads((path / "state.json").read_text())["range"] == [0, 1]


def test_a_range_keeps_its_norms_only_if_it_stays_the_same(tmp_path: Path) -> None:
    cores = trained(2)
    for core in cores:
        core.norms.resume([1.0 + core.part.index, 2.0])
    source = saved(tmp_path / "in", cores)
    for count, expected in ((2, [[1.0, 2.0], [2.0, 2.0]]), (3, [[], [], []])):
        out = cut(source, tmp_path / f"{count}", count)
        assert [resumed(out, Range(index, count), ADAM).norms.norms for index in range(count)] == expected


# -- of a backup in mid-training


def restored_version(folder: Path) -> int:
    cut(folder, folder.with_name("out"), 2)
    return resumed(folder.with_name("out"), Range(1, 2), ADAM).central.version


def test_ranges_may_be_ahead_of_the_leader_whose_counts_stand(tmp_path: Path) -> None:
    cores = trained(3)
    for core in cores[1:]:
        core.central.version += 100
    assert restored_version(saved(tmp_path / "in", cores)) == 6


def test_a_range_that_lacks_what_the_leader_counts_is_refused(tmp_path: Path) -> None:
    cores = trained(3)  # two leases, and range 0 is a commit ahead
    cores[0].central.version += 7
    assert restored_version(saved(tmp_path / "in", cores)) == 13
    cores[0].central.version += 1
    with pytest.raises(BadRanges, match=r"range-1/\S+ is 9 versions older than \S+range-0/\S+, and lacks what that counts"):
        reshard.load(saved(tmp_path / "older", cores), 2)


# -- what is refused

FEDBUFF = Hyperparameters(rule="fedbuff", shard_size=10, batch_size=10)


def change_range_1(source: Path, cores: Sequence[Core]) -> None:
    """Range 1 of another run takes the place of that of `source`."""
    shutil.rmtree(source / "range-1")
    shutil.move(saved(source.with_name("other"), cores) / "range-1", source / "range-1")


def of_another_run(source: Path) -> None:
    strangers = trained(2)
    for core in strangers:
        core.run_id = "other"
    change_range_1(source, strangers)


def damage(source: Path) -> None:
    path = next(source.glob("range-1/*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


# The number of servers before, what happens to their folders, the number to come, and what is said.
REFUSED: dict[str, tuple[int, Callable[[Path], object], int, str]] = {
    "a missing range": (
        3, lambda source: shutil.rmtree(source / "range-1"), 2, r"range 1/3 is missing \(there is 0/3, 2/3\)",
    ),
    "one range alone": (
        3, lambda source: [shutil.rmtree(source / f"range-{index}") for index in (1, 2)], 2, "range 1/3, 2/3 is missing",
    ),
    "a range that is there twice": (
        3, lambda source: shutil.copytree(source / "range-1", source / "copy"), 2, "range 1/3 is there twice",
    ),
    "another run": (2, of_another_run, 2, r"different run \(run and other\)"),
    "other hyperparameters": (
        2, lambda source: change_range_1(source, trained(2, replace(ADAM, learning_rate=0.5))), 2, "different learning_rate",
    ),
    "other numbers of servers": (2, lambda source: change_range_1(source, trained(3)), 2, "different numbers of servers"),
    "a model that is too small": (1, lambda source: None, 4, r"too small for 4 servers.*at most 3"),
    "a damaged file": (2, damage, 3, r"range-1.*its SHA-256 differs"),
    "no checkpoints": (1, lambda source: [shutil.rmtree(path) for path in source.iterdir()], 3, "holds no checkpoints"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_whole_run_is_refused_by_name(why: str, tmp_path: Path) -> None:
    before, spoil, after, said = REFUSED[why]
    source = saved(tmp_path / "in", trained(before))
    spoil(source)
    with pytest.raises(BadRanges, match=said):
        reshard.load(source, after)


def test_a_rule_that_can_only_run_on_one_server(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(1, FEDBUFF))
    with pytest.raises(BadRanges, match="use one server"):
        reshard.load(source, 2)


def test_a_folder_that_a_server_uses(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    with (source / "range-1" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadRanges, match="a server is using"):
            reshard.load(source, 3)
    reshard.load(source, 3)


def test_out_must_be_new_or_empty(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "in", trained(2)), tmp_path / "out"
    out.mkdir()
    cut(source, out, 3)
    before = content(out)
    with pytest.raises(BadRanges, match="exists: name a new folder"):
        cut(source, out, 3)
    assert content(out) == before


class _FullDisk(Storage):
    """A disk that is full after some files."""

    def __init__(self, files: int) -> None:
        self._files = files

    def create(self, path: Path) -> Any:
        if self._files == 0:
            raise OSError(28, "No space left on device")
        self._files -= 1
        return super().create(path)


@pytest.mark.parametrize("files", [0, 4])
def test_a_full_disk_leaves_nothing_behind(files: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    with pytest.raises(OSError, match="No space left"):
        reshard.write(reshard.load(source, 3), tmp_path / "out", storage=_FullDisk(files))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("part", [Range(1, 2), Range(0, 1), Range(0, 3)])
def test_a_server_of_another_range_does_not_start(part: Range, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    found = checkpoint.newest(source / "range-0", _refuse)
    assert found is not None
    with pytest.raises(checkpoint.BadCheckpoint, match=r"holds range 0/2 .*gem-ctl reshard"):
        checkpoint.restore(*found, make_core(ADAM, part=part), NOW)


@pytest.mark.parametrize("value", [[1, 1], [2, 2], [0, 0], [0, 1001], [0], "0/2"])
def test_a_range_that_cannot_be_is_refused(value: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    (path,) = (source / "range-0").glob("checkpoint-*")
    state = json.loads((path / "state.json").read_text())
    del state["sha256"]
    state["range"] = value
    (path / "state.json").write_text(json.dumps({**state, "sha256": digest(state)}))
    with pytest.raises(checkpoint.BadCheckpoint, match="range"):
        checkpoint.read_state(path)


# -- the command


def test_the_command_says_what_it_does(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(3))
    out = tmp_path / "out"
    result = CliRunner().invoke(reshard_cli.main, [str(source), str(out), "--ranges", "2"])
    assert result.exit_code == 0, result.output
    for expected in (
        "the ranges are at versions 6, 5, 5: all go on at 6, the leader's",
        "2 workers must register anew, and 2 shards are dealt again",
        f"gem-server --range 0/2 --durability log --checkpoint-dir {out}/range-0 --resume --peers HOST:PORT,...",
        f"gem-server --range 1/2 --durability log --checkpoint-dir {out}/range-1 --resume\n",
    ):
        assert expected in result.output


def test_the_command_says_in_a_line_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    result = CliRunner().invoke(reshard_cli.main, [str(tmp_path / "in"), str(tmp_path / "out"), "--ranges", "2"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "holds no checkpoints" in result.output


def test_out_may_not_lie_in_the_input(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    before = content(source)
    result = CliRunner().invoke(reshard_cli.main, [str(source), str(source / "deeper" / "out"), "--ranges", "1"])
    assert (result.exit_code, content(source)) == (1, before)
    assert "name a folder outside" in result.output
