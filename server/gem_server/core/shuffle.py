"""A seeded shuffle of any number of samples. It computes any range of the order by itself, without the rest in memory."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
Indices = npt.NDArray[np.uint64]


def shuffled(begin: int, end: int, count: int, *key: int | str) -> Indices:
    """The samples at positions [begin, end) of a random order of 0 … count − 1 that `key` determines.

    A Feistel network permutes the integers below a power of four. Results outside [0, count) pass through it again until they
    fall inside ("cycle walking", Black & Rogaway 2002). That gives a permutation of the samples.

    Returns:
        uint64, shape (end - begin,).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    values = np.arange(begin, end, dtype=np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], np.uint64(half), round_keys)
        outside = outside[values[outside] >= count]
    return values


def _feistel(values: Indices, half: np.uint64, round_keys: Indices) -> Indices:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(values: Indices) -> Indices:
    """SplitMix64's finaliser: each input bit changes about half of the output bits (multiplication wraps)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
