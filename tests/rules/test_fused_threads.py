"""A pass split over threads gives the same bits and the same counts as on one thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gem_api.layout import Layout, Vector
from gem_api.process.host_limits import MAX_APPLY_THREADS, apply_threads
from gem_server.rules import PiStatistics, make_rule
from gem_server.rules.fused import BLOCK
from gem_server.rules.threads import Threads
from kit.core import bits
from rules.passes import Run

LAYOUTS = {
    "smaller than the number of threads": Layout.of({"w": (3,)}),
    "one block": Layout.of({"w": (BLOCK,)}),
    "one large tensor": Layout.of({"w": (40 * BLOCK + 5,)}),
    "many small ones": Layout.of({f"w{number}": (number,) for number in range(120)}),
    "of all kinds": Layout.of(
        {"large": (7, BLOCK), "empty": (0,), "small": (11,), "other": (70_000,), "end": (0,), "bias": (BLOCK + 1,)}
    ),
}
RULES: dict[str, dict[str, Any]] = {
    "after": {"rule": "gem"},
    "paper": {"rule": "gem", "snapshot": "paper"},
    "reference": {"rule": "gem", "snapshot": "reference"},
    "downpour": {"rule": "downpour"},
    "adaptive": {"rule": "adaptive"},
}


def train(rule: str, layout: Layout, threads: int) -> tuple[list[bytes], list[PiStatistics | None]]:
    """Four commits of two workers: the bits of θ and of all buffers, and the facts of each commit."""
    kind = make_rule(**RULES[rule])
    if threads > 1:
        kind.use_threads(Threads(threads, least=1))
    random = np.random.default_rng(8)

    def draw() -> Vector:
        return random.normal(size=layout.size).astype(np.float32)

    run = Run.of(kind, draw(), workers=2, answered=True)
    facts = [run.commit(draw(), number % 2, 1, layout=layout) for number in range(4)]
    return [bits(run.theta)] + [bits(buffers[name]) for buffers in run.workers for name in sorted(buffers)], facts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_any_number_of_threads_gives_the_same_bits_and_counts(rule: str, layout: str) -> None:
    state, facts = train(rule, LAYOUTS[layout], 1)
    for threads in (2, 3, 8):
        again, others = train(rule, LAYOUTS[layout], threads)
        assert again == state
        _require_same_facts(facts, others)


def _require_same_facts(facts: list[PiStatistics | None], others: list[PiStatistics | None]) -> None:
    for one, other in zip(facts, others, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        np.testing.assert_array_equal(one.counts, other.counts)
        np.testing.assert_array_equal(one.tensor_medians, other.tensor_medians)
        assert one.median == other.median
        assert one.proxy_energy == pytest.approx(other.proxy_energy, rel=1e-12)
        assert one.central_energy == pytest.approx(other.central_energy, rel=1e-12)


def test_every_part_is_worked_on_once_and_by_as_many_threads_at_a_time() -> None:
    meeting, seen = threading.Barrier(4, timeout=60), []

    def work(part: int) -> None:
        meeting.wait()  # passes only when all four are here at once
        seen.append(part)

    Threads(4).run(work, 4)
    assert sorted(seen) == [0, 1, 2, 3]


def test_one_part_is_worked_on_by_the_caller() -> None:
    workers = []
    Threads(4).run(lambda part: workers.append(threading.current_thread()), 1)
    assert workers == [threading.current_thread()]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_part_is_raised_when_all_parts_have_ended(failing: int) -> None:
    ended = []

    def work(part: int) -> None:
        if part == failing:
            raise ZeroDivisionError
        ended.append(part)

    with pytest.raises(ZeroDivisionError):
        Threads(3).run(work, 3)
    assert sorted(ended) == sorted({0, 1, 2} - {failing})


def test_a_part_is_large_enough_to_be_worth_a_thread() -> None:
    threads = Threads(4, least=1000)
    assert [threads.parts(size) for size in (1, 999, 1999, 2000, 3999, 10**9)] == [1, 1, 1, 2, 3, 4]


def test_there_are_as_many_threads_as_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_api.process.host_limits.cores", lambda: 3)
    assert Threads().count == 3
    assert Threads(5).count == 5
    monkeypatch.setattr("gem_api.process.host_limits.cores", lambda: 100)
    assert Threads().count == MAX_APPLY_THREADS
    assert [apply_threads(servers) for servers in (7, 100, 101)] == [14, 1, 1]
