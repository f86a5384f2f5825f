"""Simulated runs with faults, in which no promise may be broken: 200 seeds by default, 1,000 with `make test-slow`.

A seed that fails is replayed by `World(seed, folder).run(STEPS)`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gem_server.durability import segment
from simulation.world import World

QUICK, SEEDS, GROUP, STEPS = 200, 1000, 50, 300
FIRST = [pytest.param(first, marks=[pytest.mark.slow] if first >= QUICK else []) for first in range(0, SEEDS, GROUP)]


@pytest.fixture(autouse=True)
def small_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated disk writes what is allocated."""
    monkeypatch.setattr(segment, "_ALLOCATION", 4096)


@pytest.mark.parametrize("first", FIRST)
def test_no_promise_is_broken(first: int, tmp_path: Path) -> None:
    crashes = 0
    for seed in range(first, first + GROUP):
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = World(seed, folder)
        try:
            world.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        crashes += world.crashes
    assert crashes > GROUP  # or nothing was tried
