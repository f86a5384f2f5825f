"""The result of a commit, and how a session names the θ that it handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gem_api.layout import Vector


class Base(NamedTuple):
    """Identifies a θ that a session handed out.

    Attributes:
        version: Its version; with several servers, that of range 0.
        generation: The number of the lease that the session held then.
        peer_versions: The versions of ranges 1, 2, …; empty if one server holds everything.
    """

    version: int
    generation: int
    peer_versions: tuple[int, ...] = ()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of all ranges."""
        return self.version, *self.peer_versions


@dataclass(frozen=True)
class Answer:
    """The result of a commit.

    Attributes:
        theta: The central variable to compute the next gradient on: float32, shape (P,). It is the session's own buffer, which
            the next pull or commit overwrites.
        version: Version of `theta`. With several servers, this and the next two are those of range 0.
        staleness: τ, the number of commits that the server applied between this worker's pull and its commit (Eq. 2).
        pi_median: Median of the scaling factor π; None if the rule has no π.
        lost: True if the gradient was not applied because the lease had ended. `theta` is fresh in this case too.
        discarded: True if the rule left the gradient out as too stale. `theta` is fresh in this case too.
    """

    theta: Vector
    version: int
    staleness: int = 0
    pi_median: float | None = None
    lost: bool = False
    discarded: bool = False
