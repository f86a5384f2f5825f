"""The contenders: how each starts its processes, and the learning rates it is tried at first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.versus.family import Family
from benchmarks.versus.setup import Setup


class Started(Protocol):
    """A contender whose processes run.

    Attributes:
        members: How many processes wait at the gate.
    """

    members: int

    def revive(self, worker: int) -> None:
        """Starts a killed worker again. Its process is called `worker-N`."""


@dataclass(frozen=True)
class Contender:
    """A way to train with several workers.

    Attributes:
        label: As in tables and plots.
        start: Starts its processes; the gate holds the workers until all are ready. None: its program is gone, its runs stay.
        rates: The learning rates to try first, ascending, by optimizer.
        widths: The numbers of workers it is measured with.
        far: Whether it can have workers behind a link.
    """

    label: str
    start: Callable[[Setup, Family], Started] | None
    rates: Mapping[str, tuple[float, ...]]
    widths: tuple[int, ...] = (4, 8, 16)
    far: bool = True


def contenders() -> Mapping[str, Contender]:
    """All contenders by name. Their modules are imported here, as not every command needs them."""
    from benchmarks.versus.contenders import ours, synchronous

    return {**synchronous.CONTENDERS, **ours.CONTENDERS}


def start(setup: Setup, family: Family) -> Started:
    """Starts the run's contender. The one with backup workers is in no race to a loss."""
    from benchmarks.versus.contenders.backups import Backups

    if setup.first:
        return Backups(setup, family)
    chosen = contenders()[setup.contender].start
    assert chosen is not None
    return chosen(setup, family)
