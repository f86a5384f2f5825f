"""The files of a checkpoint: complete or not there at all, private, readable by other tools; the newest few are kept."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durability.checkpoint_helpers import FILES, trained
from gem_api.formats import CHECKPOINT_FORMAT
from gem_server.durability.checkpoint import list_checkpoints, newest
from kit.core import SMALL, bits, commit, restored, save_core, write_file
from safetensors.numpy import load_file, save

pytestmark = pytest.mark.usefixtures("quick_disk")

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


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    state = json.loads((save_core(trained(), tmp_path) / "state.json").read_text())
    assert state["format"] == CHECKPOINT_FORMAT == "gem-checkpoint/2"
    assert state["hyperparameters"]["rule"] == "gem"
    assert set(state["files"]) == set(FILES[:2])


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
def test_a_write_that_fails_leaves_the_older_one(
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
