"""Finds the checkpoints of all ranges of a run, and reads what they hold as if it lay in one piece."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gem_api.checkpoint import STATE, TENSORS
from gem_api.framing import empty
from gem_api.layout import Layout, Vector
from gem_api.process.files import lock
from gem_api.ranges import Range, most_apart
from safetensors import SafetensorError, safe_open

from gem_server.core.records import Kind
from gem_server.core.values import Outcome
from gem_server.durability import checkpoint
from gem_server.durability.recovery import log_directory
from gem_server.durability.replay import Log
from gem_server.durability.segment import DamagedLog
from gem_server.durability.state import State

Say = Callable[[str], object]
_RUN_RECORDS = (Kind.COMMITTED, Kind.DEALT, Kind.COMPLETED)


class BadRanges(ValueError):
    """The checkpoints don't make up a whole run, or can't be cut as asked; the message says why and what to do."""


@dataclass(frozen=True)
class RangeFiles:
    """One range's checkpoint, checked, with the layout of its buffers."""

    path: Path
    state: State
    layout: Layout

    @property
    def part(self) -> Range:
        return self.state.part


# -- finding


def find(source: Path) -> list[Path]:
    """The checkpoints that `source` means.

    `source` is a checkpoint; or a server's folder of checkpoints; or a folder with such a folder for each range. Of a folder
    of checkpoints, the newest one counts.

    Raises:
        BadRanges: There are none, or a server uses them.
        OSError: They can't be read.
    """
    if (source / STATE).is_file():
        return [source]
    folders = [source] if checkpoint.list_checkpoints(source) else sorted(entry for entry in source.iterdir() if entry.is_dir())
    newest = [found[0] for folder in folders if (found := checkpoint.list_checkpoints(folder))]
    if not newest:
        raise BadRanges(
            f"{source} holds no checkpoints: give a server's --checkpoint-dir, or the folder with those of all ranges"
        )
    for path in newest:
        _require_at_rest(path.parent)
    return newest


def _require_at_rest(directory: Path) -> None:
    """Raises BadRanges if a server uses a folder of checkpoints."""
    try:
        with (directory / ".lock").open("rb") as file:
            at_rest = lock(file, shared=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRanges(f"can't tell whether a server is using {directory}: {error.strerror}; copy its checkpoints") from error
    if not at_rest:
        raise BadRanges(f"a server is using {directory}: drain it first, or copy its checkpoints")


def require_end(files: RangeFiles) -> None:
    """Raises BadRanges if the log tells of commits or shards after a checkpoint, which would be lost."""
    if files.state.log is None:
        return
    log = Log(log_directory(files.path.parent), files.state.log, files.state.run_id)
    try:
        goes_on = any(entry.record.kind in _RUN_RECORDS for entry in log.entries())
    except DamagedLog as error:
        raise BadRanges(f"can't tell whether {files.path} is the end of its run: {error}") from None
    if goes_on:
        raise BadRanges(
            f"the log goes on after {files.path}: start the servers with --resume and drain them, so that they write their "
            f"last checkpoints, or leave the folder log out of a copy to go back to its newest checkpoint"
        )


# -- reading


def read(paths: Sequence[Path], say: Say) -> list[RangeFiles]:
    """Reads and checks the checkpoints of all ranges; returns them in order. `say` is called with a line for each.

    Raises:
        BadRanges: One is damaged, or they are not the ranges of one run.
    """
    found = []
    for path in paths:
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        say(f"checking {path} ({size / 1e6:,.1f} MB)")
        try:
            state = checkpoint.read_state(path)
            found.append(RangeFiles(path, state, state.whole_layout.part(state.part)))
        except (checkpoint.BadCheckpoint, ValueError) as error:
            raise BadRanges(str(error)) from None
    _require_whole(found)
    found.sort(key=lambda files: files.part.index)
    _require_one_run(found)
    _require_none_older(found)
    return found


def _require_whole(found: Sequence[RangeFiles]) -> None:
    """Raises BadRanges unless each range is there once."""
    counts = sorted({files.part.count for files in found})
    if len(counts) > 1:
        several = ", ".join(f"{files.path} is {files.part}" for files in found)
        raise BadRanges(f"these checkpoints are of different numbers of servers: {several}")
    by_index: dict[int, Path] = {}
    for files in found:
        if (other := by_index.setdefault(files.part.index, files.path)) != files.path:
            raise BadRanges(f"range {files.part} is there twice: {other} and {files.path}")
    missing = [str(Range(index, counts[0])) for index in range(counts[0]) if index not in by_index]
    if missing:
        there = ", ".join(str(files.part) for files in found)
        raise BadRanges(f"range {', '.join(missing)} is missing (there is {there}): give the folder with those of all ranges")


def _require_one_run(found: Sequence[RangeFiles]) -> None:
    """Raises BadRanges if the ranges are of different runs."""
    first = found[0]
    for files in found:
        for name, what in (("run_id", "run"), ("layout", "model"), ("groups", "parameter groups")):
            if getattr(files.state, name) != getattr(first.state, name):
                values = f" ({first.state.run_id} and {files.state.run_id})" if name == "run_id" else ""
                raise BadRanges(f"{first.path} and {files.path} belong to a different {what}{values}")
        ours, theirs = (vars(each.state.hyperparameters) for each in (first, files))
        if differing := [name for name in ours if ours[name] != theirs[name]]:
            raise BadRanges(
                f"{first.path} and {files.path} have a different {min(differing)}: start all servers with the same options, "
                "then write a checkpoint"
            )


def _require_none_older(found: Sequence[RangeFiles]) -> None:
    """Raises BadRanges if a range of a backup taken in mid-training is older than the leader, by more than workers can cause.
    It would lack what the leader counts as done. Drained servers have applied all that they will."""
    leader = found[0]
    for files in found[1:]:
        behind = leader.state.version - files.state.version
        drained = leader.state.last and files.state.last
        if behind > _most_apart(leader.state, files.state) and not drained:
            raise BadRanges(
                f"{files.path} is {behind} versions older than {leader.path}, and lacks what that counts as done: take the "
                "checkpoints of one `gem-ctl checkpoint`, or copy those of range 0 before the others"
            )


def _most_apart(*states: State) -> int:
    return most_apart(
        sum(len(state.leases) + sum(state.ended.values()) for state in states),
        sum(state.outcomes.get(outcome, 0) for outcome in (Outcome.REJECTED, Outcome.DISCARDED) for state in states),
    )


class _Segment(NamedTuple):
    """Elements [begin, end) of the whole model. `elements(first, last)` are some of them, counted from `begin`."""

    begin: int
    end: int
    elements: Callable[[int, int], Vector]


class Joined:
    """A buffer of the whole model, which lies in several files. At most one tensor of each file is in memory at a time."""

    def __init__(self, segments: Sequence[_Segment]) -> None:
        self._segments = [segment for segment in segments if segment.begin < segment.end]
        self._begins = [segment.begin for segment in self._segments]

    def __call__(self, begin: int, end: int) -> Vector:
        """Elements [begin, end): float32, shape (end − begin,)."""
        if begin == end:
            return empty(0)
        those = self._segments[bisect_right(self._begins, begin) - 1 : bisect_left(self._begins, end)]
        return np.concatenate(
            [each.elements(max(begin, each.begin) - each.begin, min(end, each.end) - each.begin) for each in those]
        )


def joined_theta(found: Sequence[RangeFiles]) -> Joined:
    """θ. Raises BadRanges if a file does not hold the tensors of its layout."""
    segments = []
    for files in found:
        tensors = _open(files.path / TENSORS[0])
        begin = files.layout.begin
        for piece in files.layout.pieces:
            _require_shape(files.path, tensors, piece.name, piece.shape)
            segments.append(_Segment(begin, begin + piece.size, _elements(tensors, piece.name)))
            begin += piece.size
    return Joined(segments)


def joined_buffers(found: Sequence[RangeFiles]) -> dict[str, Joined]:
    """The buffers that the rule keeps for all workers, by the names that they have in the files. Raises BadRanges if the ranges
    have different ones."""
    files = [(each, _open(each.path / TENSORS[1])) for each in found]
    names = [sorted(name for name in tensors.keys() if name.startswith("/")) for _, tensors in files]  # noqa: SIM118
    if any(each != names[0] for each in names):
        raise BadRanges(f"the ranges keep different buffers for all workers: {names}")
    buffers = {}
    for name in names[0]:
        for each, tensors in files:
            _require_shape(each.path, tensors, name, (each.layout.size,))
        buffers[name] = Joined(
            [_Segment(each.layout.begin, each.layout.end, _elements(tensors, name)) for each, tensors in files]
        )
    return buffers


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise BadRanges(f"{path}: {error}") from None


def _require_shape(path: Path, tensors: Any, name: str, shape: tuple[int, ...]) -> None:
    try:
        tensor = tensors.get_slice(name)
    except SafetensorError as error:
        raise BadRanges(f"{path}: {error}") from None
    if (tensor.get_dtype(), tuple(tensor.get_shape())) != ("F32", shape):
        raise BadRanges(f"{path}: tensor {name!r} is {tensor.get_dtype()} of shape {tensor.get_shape()}, not F32 of {shape}")


def _elements(tensors: Any, name: str) -> Callable[[int, int], Vector]:
    """Reads elements of a tensor in C order; of one with several axes, the rows that they lie in."""

    def elements(first: int, last: int) -> Vector:
        tensor = tensors.get_slice(name)
        shape = tensor.get_shape()
        if not shape:
            whole: Vector = tensors.get_tensor(name).reshape(-1)
            return whole[first:last]
        row = int(np.prod(shape[1:], dtype=np.int64))
        rows: Vector = tensor[first // row : -(-last // row)].reshape(-1)
        return rows[first % row : first % row + last - first]

    return elements
