"""The edges and middles of the bins of π's histogram."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gem_server.rules.fused import BINS, BITS_PER_BIN


def first_bin(pi_max: np.float32) -> int:
    """The number of the float32 bin (the upper bits of the bit pattern) that gets index 0. Values just below `pi_max` then get
    index BINS - 2."""
    return int((np.float32(pi_max).view(np.int32) - 1) >> BITS_PER_BIN) - (BINS - 2)


@lru_cache
def bin_edges(pi_max: float) -> npt.NDArray[np.float32]:
    """Lower edges of the bins of π: float32, shape (BINS,). Bin 0 holds π = 0 alone, the last one π = π_max alone. Any other
    bin i holds (edges[i], edges[i + 1]], closed above like Prometheus's buckets."""
    lowest = first_bin(np.float32(pi_max))
    edges = (np.arange(lowest, lowest + BINS, dtype=np.int32) << BITS_PER_BIN).view(np.float32).copy()
    edges[:2], edges[-1] = 0, pi_max
    return edges


@lru_cache
def bin_middles(pi_max: float) -> npt.NDArray[np.float64]:
    """The value that represents each bin: float64, shape (BINS,), read-only. It is within 1/32 (relative) of any in the bin."""
    edges = bin_edges(pi_max).astype(np.float64)
    middles = np.append((edges[:-1] + edges[1:]) / 2, edges[-1])
    middles[0] = 0
    middles.flags.writeable = False
    return middles
