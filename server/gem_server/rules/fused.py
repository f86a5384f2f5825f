"""The fused pass of Gradient Energy Matching: one walk over memory for m, π, θ, s and the statistics.

The walk goes in blocks that stay in the first-level cache, so that the statistics read what the update has just
written. State updates are plain IEEE float32 in a fixed order (a replay gives identical bits); only the sums of the
statistics may be re-associated. The GIL is released.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

BLOCK = 4096
BINS = 256
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}
_ZERO = np.float32(0)
_BITS_PER_BIN = 19  # of float32's 23 mantissa bits: 16 bins to an octave


def first_bin(pi_max: np.float32) -> int:
    """Number of the float32 bin that has index 0, such that values just below `pi_max` have index BINS - 2."""
    return int((np.float32(pi_max).view(np.int32) - 1) >> _BITS_PER_BIN) - (BINS - 2)


def bin_edges(pi_max: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32, shape (BINS,): lower edges of the bins of π. Bin 0 holds π = 0 alone, the last one π = π_max alone, and any
    other (edges[i], edges[i + 1]], closed above as Prometheus counts."""
    lowest = first_bin(np.float32(pi_max))
    edges = (np.arange(lowest, lowest + BINS, dtype=np.int32) << _BITS_PER_BIN).view(np.float32).copy()
    edges[:2], edges[-1] = 0, pi_max
    return edges


@njit(**_OPTIONS)
def _update(theta, gradient, moment, snapshot, pi, eta, mu, kappa, epsilon_inside, epsilon_outside, pi_max):  # type: ignore[no-untyped-def]
    """Eqs. 24, 19 and 27 on one block; all six arrays are distinct, or the loop would not vectorise."""
    for i in range(theta.size):
        delta = -eta * gradient[i]
        m = mu * moment[i] + delta
        drift = abs(theta[i] - snapshot[i])
        factor = (kappa * abs(m) - drift) / (abs(delta + epsilon_inside) + epsilon_outside)
        factor = factor if factor > _ZERO else _ZERO  # also turns 0/0 into 0
        factor = factor if factor < pi_max else pi_max
        moment[i] = m
        pi[i] = factor
        theta[i] = theta[i] + factor * delta


@njit(fastmath={"reassoc", "contract"}, **_OPTIONS)
def _energies(moment, kappa, theta, snapshot):  # type: ignore[no-untyped-def]
    """Sums of (κ·m)² and (θ − s)² over one block."""
    proxy, central = _ZERO, _ZERO
    for i in range(theta.size):
        speed = kappa * moment[i]
        proxy += speed * speed
        move = theta[i] - snapshot[i]
        central += move * move
    return proxy, central


@njit(**_OPTIONS)
def _bins(pi, index, lowest, pi_max):  # type: ignore[no-untyped-def]
    """The bin of each π. Positive floats order like their bits, so a shift finds it without a search; one bit less puts a
    value on an edge into the bin below."""
    bits = pi.view(np.int32)
    for i in range(pi.size):
        bin_ = min(max(((bits[i] - 1) >> _BITS_PER_BIN) - lowest, 1), BINS - 2)
        bin_ = 0 if bits[i] == 0 else bin_
        index[i] = BINS - 1 if pi[i] == pi_max else bin_


@njit(**_OPTIONS)
def _count(index, counts):  # type: ignore[no-untyped-def]
    """Adds bins to eight tables in turn: neighbours often share a bin, and one table would wait for its own stores."""
    even = index.size - index.size % 8
    for i in range(0, even, 8):
        for lane in range(8):
            counts[lane, index[i + lane]] += 1
    for i in range(even, index.size):
        counts[0, index[i]] += 1


@njit(**_OPTIONS)
def quantile(counts, edges, share):  # type: ignore[no-untyped-def]
    """The value below which `share` of the counted π lie, interpolated linearly inside its bin (1/16 octave wide)."""
    total = counts.sum()
    rank = share * total
    below = 0
    for i in range(BINS):
        if below + counts[i] >= rank and counts[i] > 0:
            if i == 0 or i == BINS - 1:
                return edges[i]
            return edges[i] + (edges[i + 1] - edges[i]) * np.float32((rank - below) / counts[i])
        below += counts[i]
    return _ZERO


@njit(**_OPTIONS)
def gem_pass(theta, gradient, moment, snapshot, answer, offsets, edges, scalars, snapshot_after, counts, medians):  # type: ignore[no-untyped-def]
    """Applies one commit to the whole central variable.

    Args:
        theta, gradient, moment, snapshot: float32, shape (P,), distinct. θ, m and s are updated in place.
        answer: float32, shape (P,): receives θ_{t+1}; or shape (0,) where the snapshot itself is the answer.
        offsets: int64, shape (tensors + 1,): where each tensor lies.
        edges: float32, shape (BINS,), from `bin_edges`.
        scalars: float32 η, μ, κ, ε inside |Δ + ε|, ε outside |Δ| + ε, π_max.
        snapshot_after: Whether s becomes θ_{t+1} (else θ_t).
        counts: int64, shape (BINS,): receives the histogram of π.
        medians: float32, shape (tensors,): receives each tensor's median π.

    Returns:
        The energies ½Σ(κ·m)² and ½Σ(θ_{t+1} − s)², s being the snapshot before this commit.
    """
    eta, mu, kappa, epsilon_inside, epsilon_outside, pi_max = scalars
    lowest = (edges.view(np.int32)[2] >> _BITS_PER_BIN) - 2
    pi = np.empty(BLOCK, np.float32)
    before = np.empty(BLOCK, np.float32)
    index = np.empty(BLOCK, np.uint8)
    lanes = np.empty((8, BINS), np.uint32)
    of_tensor = np.empty(BINS, np.int64)
    counts[:] = 0
    proxy_energy, central_energy = 0.0, 0.0
    for tensor in range(offsets.size - 1):
        lanes[:] = 0
        begin, end = offsets[tensor], offsets[tensor + 1]
        while begin < end:
            stop = min(begin + BLOCK, end)
            size = stop - begin
            if not snapshot_after:
                before[:size] = theta[begin:stop]
            _update(
                theta[begin:stop], gradient[begin:stop], moment[begin:stop], snapshot[begin:stop], pi[:size],
                eta, mu, kappa, epsilon_inside, epsilon_outside, pi_max,
            )  # fmt: skip
            proxy, central = _energies(moment[begin:stop], kappa, theta[begin:stop], snapshot[begin:stop])
            proxy_energy += proxy
            central_energy += central
            _bins(pi[:size], index[:size], lowest, pi_max)
            _count(index[:size], lanes)
            if snapshot_after:
                snapshot[begin:stop] = theta[begin:stop]
            else:
                snapshot[begin:stop] = before[:size]
            if answer.size:
                answer[begin:stop] = theta[begin:stop]
            begin = stop
        of_tensor[:] = 0
        for lane in range(8):
            of_tensor += lanes[lane]
        medians[tensor] = quantile(of_tensor, edges, 0.5)
        counts += of_tensor
    return 0.5 * proxy_energy, 0.5 * central_energy


@njit(**_OPTIONS)
def descend(theta, gradient, eta, divisor, snapshot):  # type: ignore[no-untyped-def]
    """θ ← θ + (−η·g) / divisor, then s ← θ; float32, shape (P,), distinct."""
    for i in range(theta.size):
        delta = -eta * gradient[i]
        theta[i] = theta[i] + delta / divisor
        snapshot[i] = theta[i]


@njit(**_OPTIONS)
def all_within(values, limit):  # type: ignore[no-untyped-def]
    """Whether |v| ≤ limit for every element; a NaN is within nothing."""
    inside = np.int32(1)
    for i in range(values.size):
        inside &= np.int32(abs(values[i]) <= limit)
    return inside == 1
