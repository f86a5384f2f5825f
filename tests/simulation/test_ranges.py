"""Simulated runs of two and of three ranges, with faults, in which no promise may be broken: 24 seeds by default, 240 with
`make test-slow`.

A seed that fails is replayed by `RangesWorld(seed, folder).run(STEPS)` inside `small()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.ranges_world import RangesWorld, small

QUICK, SEEDS, GROUP, STEPS = 24, 240, 12, 6000
FIRST = [pytest.param(first, marks=[pytest.mark.slow] if first >= QUICK else []) for first in range(0, SEEDS, GROUP)]


@pytest.fixture(autouse=True)
def small_ranges() -> Iterator[None]:
    with small():
        yield


@pytest.mark.parametrize("first", FIRST)
def test_no_promise_is_broken(first: int, tmp_path: Path) -> None:
    crashes = torn = manifests = 0
    for seed in range(first, first + GROUP):
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = RangesWorld(seed, folder)
        try:
            world.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        crashes += world.crashes
        torn += len(world.truth.torn)
        manifests += world.truth.manifests
    assert min(crashes, torn, manifests) > GROUP // 2  # or nothing was tried
