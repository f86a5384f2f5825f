"""Where the bins of π's histogram lie."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gem_server.rules.fused import BINS, BITS_PER_BIN


def first_bin(pi_max: np.float32) -> int:
    """Number of the float32 bin that has index 0, such that values just below `pi_max` have index BINS - 2."""
    return int((np.float32(pi_max).view(np.int32) - 1) >> BITS_PER_BIN) - (BINS - 2)


def bin_edges(pi_max: float) -> npt.NDArray[np.float32]:
    """float32, shape (BINS,): lower edges of the bins of π. Bin 0 holds π = 0 alone, the last one π = π_max alone, and any
    other (edges[i], edges[i + 1]], closed above as Prometheus counts."""
    lowest = first_bin(np.float32(pi_max))
    edges = (np.arange(lowest, lowest + BINS, dtype=np.int32) << BITS_PER_BIN).view(np.float32).copy()
    edges[:2], edges[-1] = 0, pi_max
    return edges


@lru_cache
def bin_middles(pi_max: float) -> npt.NDArray[np.float64]:
    """float64, shape (BINS,), not to be written to: a value that stands for each bin, at most 1/32 from any in it."""
    edges = bin_edges(pi_max).astype(np.float64)
    middles = np.append((edges[:-1] + edges[1:]) / 2, edges[-1])
    middles[0] = 0
    middles.flags.writeable = False
    return middles
