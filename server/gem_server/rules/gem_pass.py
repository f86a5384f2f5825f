"""Runs the compiled pass of energy matching over a rule's threads, and gathers its statistics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from gem_api.layout import Layout, Vector

from gem_server.rules.base import NO_REPLY, Buffers, PiStatistics
from gem_server.rules.bins import bin_edges
from gem_server.rules.fused import BINS, Scalars, gem_part, join_parts
from gem_server.rules.threads import Threads

_PIECE = 1 << 13  # elements that stay in the cache


class Step(NamedTuple):
    """The way from a gradient to Δ in the pass.

    Attributes:
        moments: The proxy's displacement, which the pass completes, and an empty array; or the optimizer's moments.
        code: The compiled step.
        numbers: float32: the optimizer's numbers for this commit.
        decay: float32: λ.
        bound: float32: the largest |Δ|.
    """

    moments: tuple[Vector, Vector]
    code: int
    numbers: Vector
    decay: np.float32
    bound: np.float32


def match_energy(
    threads: Threads, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, step: Step, scalars: Scalars,
    snapshot: str = "after",
) -> PiStatistics:  # fmt: skip
    """Applies one commit in place; `snapshot` is the convention. Returns the facts about π."""
    parts = threads.parts(theta.size)
    offsets, edges = layout.offsets, bin_edges(scalars.pi_max)
    counts = np.empty((parts, 3, BINS + 1), np.int64)
    shared = np.empty((parts, 2), np.int64)
    medians = np.zeros(offsets.size - 1, np.float32)
    energies = np.empty((parts, 2))
    arguments = (
        parts, theta, update, *step.moments, buffers["snapshot"], buffers.get("answer", NO_REPLY), offsets, layout.factors,
        edges, np.array(scalars, np.float32), step.code, step.numbers, step.decay, step.bound, snapshot == "after",
        snapshot == "reference", counts, shared, medians, energies,
    )  # fmt: skip
    threads.run(lambda part: gem_part(part, *arguments), parts)
    median, proxy_energy, central_energy = join_parts(offsets, edges, counts, shared, medians, energies)
    return PiStatistics(counts[0, 0, :BINS], edges, float(median), medians, proxy_energy, central_energy)


def between(threads: Threads, theta: Vector, source: Vector, ratio: float, out: Vector) -> None:
    """out ← θ + r·(source − θ), each float32, of shape (P,); `out` may be `source`."""
    parts, factor = threads.parts(theta.size), np.float32(ratio)
    edges = np.linspace(0, theta.size, parts + 1).astype(int)

    def work(part: int) -> None:
        room = np.empty(min(_PIECE, theta.size), np.float32)
        for begin in range(edges[part], edges[part + 1], _PIECE):
            piece = slice(begin, min(begin + _PIECE, edges[part + 1]))
            moved = room[: piece.stop - begin]
            np.subtract(source[piece], theta[piece], out=moved)
            np.multiply(factor, moved, out=moved)
            np.add(theta[piece], moved, out=out[piece])

    threads.run(work, parts)
