"""gem-ctl reshard: the checkpoints of a run, cut anew."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import Range
from gem_server.core.facts import LeadsAnswer
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, reshard, reshard_cli
from gem_server.durability.manifest import Entry, Manifest, write_manifest
from gem_server.durability.range_files import BadRanges
from gem_server.durability.storage import Storage
from kit.core import bits, commit, make_core, save_core
from safetensors.numpy import load_file

# 3 ranges cut w and v; a scalar, a vector and a tensor without elements lie between.
LAYOUT = Layout.of({"w": (70, 100), "none": (0, 4), "scale": (), "v": (90, 2, 40), "b": (500,)})
ADAM = Hyperparameters(rule="gem", optimizer="adam", shard_size=10, batch_size=10)
SETTINGS = [ADAM, Hyperparameters(shard_size=10, batch_size=10), Hyperparameters(rule="dcasgd", shard_size=10, batch_size=10)]
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
        core.register(name, layout, NOW, lead=LeadsAnswer(lease_id, cores[0].run_id, cores[0].settings))
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
    """θ and the shared buffers of all ranges, each in one piece."""
    names = cores[0].shared.buffers
    buffers = {name: bits(np.concatenate([core.shared.buffers[name] for core in cores])) for name in names}
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
    out = cut(saved(tmp_path / "in", cores), tmp_path / "out", after)
    restored = [resumed(out, Range(index, after), settings) for index in range(after)]
    assert joined(restored) == joined(cores)
    lead = cores[0]
    for core in restored:
        assert (core.run_id, core.central.version, core.next_ticket) == ("run", lead.central.version, lead.next_ticket)
        assert (core.steps_done, core.samples_committed) == (lead.steps_done, lead.samples_committed)
        assert (core.outcomes, core.leases.live) == (lead.outcomes, {})
        assert core.leases.ended["rolled_back"] == 2  # type: ignore[index]
    _join(restored, "ann", LAYOUT)


def test_the_ledger_goes_on_with_the_lead_and_held_shards_are_dealt_again(tmp_path: Path) -> None:
    out = cut(saved(tmp_path / "in", trained(3)), tmp_path / "out", 2)
    lead, other = (resumed(out, Range(index, 2), ADAM) for index in range(2))
    assert (lead.ledger.completed, lead.ledger.held, lead.ledger.pending) == (1, {}, 9)
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


def test_the_input_stays_as_it_was(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(3))
    before = content(source)
    cut(source, tmp_path / "out", 2)
    assert content(source) == before


# -- by a manifest


def with_manifest(folder: Path, cores: Sequence[Core]) -> tuple[Path, list[Path]]:
    """Writes the checkpoints of all ranges, a manifest beside that of range 0, and a newer checkpoint of each range."""
    saved(folder, cores)
    paths = [next((folder / f"range-{core.part.index}").glob("checkpoint-*")) for core in cores]
    digests = [hashlib.sha256((path / "state.json").read_bytes()).hexdigest() for path in paths]
    entries = [
        Entry(f"host-{index}:50051", str(path), core.central.version, digest)
        for index, (core, path, digest) in enumerate(zip(cores, paths, digests, strict=True))
    ]
    manifest = write_manifest(folder / "range-0", Manifest("run", {"lease-1": 3}, tuple(entries)))
    for core in cores:
        commit(core, "lease-1", 4, np.ones(core.central.size))
    saved(folder, cores)
    return manifest, paths


def test_a_manifest_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    cores = trained(3)
    before = joined(cores)
    manifest, _ = with_manifest(tmp_path / "in", cores)
    out = cut(manifest, tmp_path / "out", 2)
    assert joined([resumed(out, Range(index, 2), ADAM) for index in range(2)]) == before


@pytest.mark.parametrize("place", ["beside", "ranges beside", "as it was"])
def test_the_checkpoints_of_a_manifest_are_found(place: str, tmp_path: Path) -> None:
    cores = trained(3)
    before = joined(cores)
    manifest, paths = with_manifest(tmp_path / "in", cores)
    backup = tmp_path / "backup"
    backup.mkdir()
    shutil.copy(manifest, backup)
    for index, path in enumerate(paths):
        if place == "beside":  # those of different ranges may have the same name
            continue
        if place == "ranges beside":
            shutil.copytree(path, backup / f"range-{index}" / path.name)
    if place == "beside":
        shutil.move(tmp_path / "in", tmp_path / "moved")
        backup = tmp_path / "moved" / "range-0"
    elif place == "ranges beside":
        shutil.rmtree(tmp_path / "in")
    out = cut(backup / "manifest.json", tmp_path / "out", 1)
    assert joined([resumed(out, Range(0, 1), ADAM)]) == before


def test_a_checkpoint_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    manifest, paths = with_manifest(tmp_path / "in", trained(2))
    state = paths[1] / "state.json"
    state.write_text(state.read_text() + " ")
    with pytest.raises(BadRanges, match=r"range 1 .*host-1:50051.*its SHA-256 differs"):
        reshard.load(manifest, 2)
    shutil.rmtree(paths[1])
    with pytest.raises(BadRanges, match=r"range 1 .*is not here: copy it to .*range-1"):
        reshard.load(manifest, 2)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "a pipe"])
def test_a_manifest_with_a_path_that_no_checkpoint_can_have_is_refused(path: str, tmp_path: Path) -> None:
    manifest, paths = with_manifest(tmp_path / "in", trained(2))
    shutil.rmtree(paths[1])
    if path == "a pipe":
        os.mkfifo(tmp_path / "state.json")
        path = str(tmp_path)
    content = json.loads(manifest.read_text())
    content["ranges"][1]["path"] = path
    manifest.write_text(json.dumps(content))
    result = CliRunner().invoke(reshard_cli.main, [str(manifest), str(tmp_path / "out"), "--ranges", "2"])
    assert isinstance(result.exception, SystemExit)
    assert "of range 1 (on the server at host-1:50051), which is not here" in result.output


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"format": "gem-manifest/2", "run_id": "r", "cut": {}, "ranges": []}', "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(BadRanges, match=r"manifest"):
            reshard.load(tmp_path / "manifest.json", 2)


# -- what is refused


def test_a_missing_range(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(3))
    shutil.rmtree(source / "range-1")
    with pytest.raises(BadRanges, match=r"range 1/3 is missing \(there is 0/3, 2/3\)"):
        reshard.load(source, 2)
    with pytest.raises(BadRanges, match=r"range 1/3, 2/3 is missing"):
        reshard.load(source / "range-0", 2)


def test_a_range_that_is_there_twice(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(3))
    shutil.copytree(source / "range-1", source / "range-1-copy")
    with pytest.raises(BadRanges, match="range 1/3 is there twice"):
        reshard.load(source, 2)


def test_ranges_of_different_runs(tmp_path: Path) -> None:
    source, strangers = saved(tmp_path / "in", trained(2)), trained(2)
    for core in strangers:
        core.run_id = "other"
    other = saved(tmp_path / "other", strangers)
    shutil.rmtree(source / "range-1")
    shutil.move(other / "range-1", source / "range-1")
    with pytest.raises(BadRanges, match=r"different run \(run and other\)"):
        reshard.load(source, 2)


def test_ranges_with_different_hyperparameters(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    other = saved(tmp_path / "other", trained(2, replace(ADAM, learning_rate=0.5)))
    shutil.rmtree(source / "range-1")
    shutil.move(other / "range-1", source / "range-1")
    with pytest.raises(BadRanges, match="different learning_rate"):
        reshard.load(source, 2)


def test_ranges_of_different_numbers_of_servers(tmp_path: Path) -> None:
    source, other = saved(tmp_path / "in", trained(2)), saved(tmp_path / "other", trained(3))
    shutil.move(other / "range-2", source / "range-2")
    with pytest.raises(BadRanges, match="different numbers of servers"):
        reshard.load(source, 2)


def test_a_model_that_is_too_small(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(1))
    with pytest.raises(BadRanges, match=r"too small for 4 servers.*at most 3"):
        reshard.load(source, 4)


def test_a_rule_that_can_only_run_on_one_server(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(1, Hyperparameters(rule="fedbuff", shard_size=10, batch_size=10)))
    with pytest.raises(BadRanges, match="use one server"):
        reshard.load(source, 2)


def test_a_damaged_file(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(2))
    path = next(source.glob("range-1/*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BadRanges, match=r"range-1.*its SHA-256 differs"):
        reshard.load(source, 3)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(BadRanges, match="holds no checkpoints"):
        reshard.load(tmp_path, 3)


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
    (path / "state.json").write_text(json.dumps({**state, "sha256": checkpoint._digest(state)}))
    with pytest.raises(checkpoint.BadCheckpoint, match="range"):
        checkpoint.read_state(path)


# -- the command


def test_the_command_says_what_it_does(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", trained(3))
    out = tmp_path / "out"
    result = CliRunner().invoke(reshard_cli.main, [str(source), str(out), "--ranges", "2"])
    assert result.exit_code == 0, result.output
    for expected in (
        "the ranges are at versions 6, 5, 5: all go on at 6, the lead's",
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
