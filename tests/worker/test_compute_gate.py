"""The compute gate: a few threads at a time, in random or in fixed order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from gem_worker.compute_gate import TURNS, ComputeGate
from kit.server import wait_until


def test_so_many_get_through_at_once_and_no_more() -> None:
    gate, inside, most = ComputeGate(2), [], []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(200):
            with gate.slot():
                with lock:
                    inside.append(1)
                    most.append(len(inside))
                with lock:
                    inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert len(most) == 1200
    assert max(most) <= 2


def order_of_turns(choose: Callable[[int], int], threads: int = 20) -> list[int]:
    """The order in which threads get a turn that have asked for it one after the other."""
    gate, order = ComputeGate(1, choose), []

    def work(number: int) -> None:
        with gate.slot():
            order.append(number)

    def is_waiting(count: int) -> bool:
        return len(gate._waiting) == count

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    with gate.slot():
        for number, worker in enumerate(workers):
            worker.start()
            wait_until(partial(is_waiting, number + 1), "the next to wait")
    for worker in workers:
        worker.join(30)
    return order


def test_turns_come_in_a_random_order_and_everybody_gets_one() -> None:
    orders = [order_of_turns(Random(seed).randrange) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(20)) != order for order in orders)


def test_fixed_turns_are_first_come_first_served() -> None:
    assert order_of_turns(TURNS["fixed"]) == list(range(20))


def test_a_turn_is_given_back_by_one_that_fails() -> None:
    gate = ComputeGate(1)
    with pytest.raises(ValueError, match="broken"), gate.slot():
        raise ValueError("broken")
    with gate.slot():
        assert gate._free == 0
    assert gate._free == 1
