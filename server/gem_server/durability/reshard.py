"""Cuts a run anew for another number of servers, on the files of its checkpoints alone.

θ and the buffers that the rule keeps for all workers are flat arrays: they are joined and cut, to the bit. The rest comes from
range 0, which leads. All leases end: each is bound to the layout of a range, so that its worker must register anew in any case.
What the server kept for that worker (with GEM its momentum and snapshot) is dropped, and the worker's shards are dealt again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gem_api import __version__
from gem_api.checkpoint import STATE, name_of
from gem_api.errors import InvalidRequest
from gem_api.formats import CHECKPOINT_FORMAT
from gem_api.layout import Layout, Vector
from gem_api.ranges import Range

from gem_server.core.memory_budget import FLOAT_BYTES
from gem_server.core.shards import LedgerState, ShardLedger
from gem_server.core.values import EndReason
from gem_server.durability.checkpoint import Tensors, write_files
from gem_server.durability.range_files import (
    BadRanges,
    Joined,
    RangeFiles,
    Say,
    find,
    joined_buffers,
    joined_theta,
    read,
    require_end,
)
from gem_server.durability.state import State
from gem_server.durability.storage import DISK, Storage, write_atomically
from gem_server.rules import RULES, rule_of
from gem_server.rules.base import require_by_element

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Resharding:
    """A run, with the checkpoints of its ranges in order, that is about to be cut into `count` ranges."""

    found: Sequence[RangeFiles]
    count: int

    @property
    def leader(self) -> State:
        """The state of range 0."""
        return self.found[0].state

    @cached_property
    def layout(self) -> Layout:
        """The whole model's layout."""
        return self.found[0].layout.whole

    @property
    def leases(self) -> int:
        """The number of leases that end."""
        return len({lease.lease_id for files in self.found for lease in files.state.leases})

    @property
    def shards(self) -> int:
        """The number of shards that workers held, and that are dealt again."""
        return len(self.leader.ledger.held)

    @property
    def versions(self) -> list[int]:
        """The versions of the ranges. They differ by commits that came between their copies, and by those that did not reach
        all of them before their workers died."""
        return [files.state.version for files in self.found]

    def require_possible(self) -> None:
        """Raises BadRanges if the model is too small for so many ranges, or its rule can't run on several servers."""
        try:
            for index in range(self.count):
                self.layout.part(Range(index, self.count))
            settings = self.leader.hyperparameters
            if self.count > 1 and settings.rule in RULES:  # a user's own is not loaded here: the server checks it
                require_by_element(rule_of(settings))
        except (InvalidRequest, ValueError) as error:
            raise BadRanges(str(error)) from None

    def state(self, part: Range) -> State:
        """The state of a new range."""
        ended = {**self.leader.ended, EndReason.ROLLED_BACK: self.leader.ended.get(EndReason.ROLLED_BACK, 0) + self.leases}
        as_before = self.count == len(self.found)  # the norms of other ranges say nothing about those of this one
        return replace(
            self.leader,
            format=CHECKPOINT_FORMAT,
            server_version=__version__,
            leases=[],
            ended=ended,
            norms=self.found[part.index].state.norms if as_before else [],
            ledger=self._ledger(part),
            range=(part.index, part.count),
            log=None,
            last=False,
        )

    def _ledger(self, part: Range) -> LedgerState:
        """The ledger with all shards returned, if the range leads; else an empty one."""
        ledger = ShardLedger(self.leader.hyperparameters)
        if part.leads:
            ledger.restore(self.leader.ledger)
            for lease_id in {held[0]: None for held in self.leader.ledger.held}:
                ledger.release(lease_id)
        return ledger.state()


def load(source: Path, count: int, say: Say = lambda line: None) -> Resharding:
    """Finds, reads and checks the checkpoints that are to be cut into `count` ranges. `say` is called with a line for each.

    Args:
        source: As for `range_files.find`.

    Raises:
        BadRanges: It can't be done; the message says why.
        OSError: A file can't be read.
    """
    resharding = Resharding(read(find(source), say), count)
    if not (source / STATE).is_file():
        for files in resharding.found:
            require_end(files)
    resharding.require_possible()
    return resharding


def require_new(out: Path) -> None:
    """Raises BadRanges if there is something at `out` other than an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadRanges(f"{out} exists: name a new folder")


def require_outside(source: Path, out: Path) -> None:
    """Raises BadRanges if `out` lies in the folder `source`, where the next resharding would take it for a range."""
    if source.resolve() in out.resolve().parents:
        raise BadRanges(f"{out} lies in {source}, of which nothing may change: name a folder outside")


def nbytes(resharding: Resharding) -> int:
    """Bytes that `write` will write, without the headers."""
    return FLOAT_BYTES * resharding.layout.size * (1 + len(joined_buffers(resharding.found)))


def write(resharding: Resharding, out: Path, advance: Advance = lambda nbytes: None, storage: Storage = DISK) -> None:
    """Writes a folder of checkpoints for each new range: out/range-0 and so on; `out` itself if there is only one.

    Everything is written beside `out` first, and appears there whole or not at all. `advance` is called with the bytes written.

    Raises:
        BadRanges: `out` exists, or the files do not hold what they should.
        OSError: It can't be written.
    """
    require_new(out)
    out = out.absolute()
    theta, buffers = joined_theta(resharding.found), joined_buffers(resharding.found)
    scratch = out.parent / f".{out.name}.writing-{os.getpid()}"
    with write_atomically(storage, scratch, out):
        storage.make_directories(scratch, 0o700)
        for index in range(resharding.count):
            _write_range(resharding, Range(index, resharding.count), scratch, theta, buffers, advance, storage)
        storage.sync_directory(scratch)


def folder_of(out: Path, part: Range) -> Path:
    """The folder of checkpoints of one new range."""
    return out if part.whole else out / f"range-{part.index}"


def _write_range(
    resharding: Resharding,
    part: Range,
    out: Path,
    theta: Joined,
    buffers: dict[str, Joined],
    advance: Advance,
    storage: Storage,
) -> None:
    """Writes the checkpoint of one new range."""
    state, layout = resharding.state(part), resharding.layout.part(part)
    folder = folder_of(out, part) / name_of(state.version)
    storage.make_directories(folder, 0o700)
    offsets = {piece.name: layout.begin + int(at) for piece, at in zip(layout.pieces, layout.offsets, strict=False)}
    shapes = {piece.name: piece.shape for piece in layout.pieces}
    sizes = {piece.name: piece.size for piece in layout.pieces}

    def piece(name: str) -> Vector:
        tensor = theta(offsets[name], offsets[name] + sizes[name])
        advance(tensor.nbytes)
        return tensor.reshape(shapes[name])

    def buffer(name: str) -> Vector:
        tensor = buffers[name](layout.begin, layout.end)
        advance(tensor.nbytes)
        return tensor

    write_files(folder, state, Tensors(shapes, piece), Tensors(dict.fromkeys(buffers, (layout.size,)), buffer), storage)
    storage.sync_directory(folder.parent)
