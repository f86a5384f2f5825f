"""The average of θ that a run may keep: an exponential moving average over its versions. One pass over both arrays."""

from __future__ import annotations

import numpy as np
from gem_api.compiled import compiled
from gem_api.layout import Vector

from gem_server.rules.threads import Threads

AVERAGE = "average"  # the array's name in checkpoints; a rule may not keep another of that name


def follow(threads: Threads, theta: Vector, average: Vector, decay: float) -> None:
    """a ← a + (1 − β)·(θ − a) for the average a, float32, shape (P,), in place; `specification.average` is the equation.

    The threads do not change the bits. β is not multiplied with a: rounded to float32, β and 1 − β do not add up to 1, and the
    average would settle beside θ.
    """
    parts, rest = threads.parts(theta.size), np.float32(1 - decay)
    edges = np.linspace(0, theta.size, parts + 1).astype(np.uint64)
    threads.run(lambda part: _follow(theta, average, edges[part], edges[part + 1], rest), parts)


@compiled(nogil=True, error_model="numpy")
def _follow(theta, average, begin, end, rest):  # type: ignore[no-untyped-def]
    """`follow` on [begin, end)."""
    for i in range(begin, end):
        average[i] = average[i] + rest * (theta[i] - average[i])
