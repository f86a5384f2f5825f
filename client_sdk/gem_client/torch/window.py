"""The steps that a worker makes between two commits, counted."""

from __future__ import annotations


class Window:
    """Counts the steps since the last commit, and takes the mean of their losses.

    Attributes:
        made: Number of steps in this window so far.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self.made = 0

    @property
    def loss(self) -> float | None:
        """Mean of the losses given to the window's steps; None if there were none."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def restart(self) -> None:
        """Begins to count anew."""
        self._losses.clear()
        self.made = 0

    def count(self, loss: float | None) -> None:
        """Counts a step, with its loss if it has one."""
        if loss is not None:
            self._losses.append(loss)
        self.made += 1
