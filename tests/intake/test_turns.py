"""Turns: large gradients arrive one at a time, first come first served; nobody slow, gone or failed keeps others waiting."""

from __future__ import annotations

from asyncio import Future
from concurrent.futures import Future as PlainFuture
from typing import Any

import numpy as np
import pytest
from gem_api.errors import Overloaded
from gem_api.framing import upload_buffers
from gem_api.layout import Layout
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.intake.turns import AHEAD, FIRST, GRACE, IN_FLIGHT, LONGEST, PATIENCE, Turns
from gem_server.intake.uploads import Uploads
from kit.core import make_core, start

SIZE = 32
NBYTES = 4 * SIZE


class Clock:
    """Stands for an event loop, and for the time."""

    now = 0.0

    def create_future(self) -> PlainFuture[Any]:
        return PlainFuture()

    def call_soon_threadsafe(self, work: Any, *arguments: Any) -> None:
        work(*arguments)


def turns(workers: int = 6, limit: int = 0) -> tuple[Uploads, Core, Clock]:
    core, clock = make_core(), Clock()
    start(core, [f"worker-{number}" for number in range(workers)], Layout.of({"w": (SIZE,)}))
    core.memory.limit = core.memory.held + limit if limit else 0
    return Uploads(core.memory, clock, lambda: clock.now, lambda: 3, small=0), core, clock  # type: ignore[arg-type]


def begin(queue: Uploads, client: str = "ann") -> Upload | Future[Upload]:
    return queue.begin(client, NBYTES)


def begun(asked: Upload | Future[Upload]) -> Upload:
    return asked if isinstance(asked, Upload) else asked.result()


def waits(asked: Upload | Future[Upload]) -> bool:
    return not isinstance(asked, Upload) and not asked.done()


def test_one_arrives_at_a_time_and_the_next_is_the_one_that_came_first() -> None:
    queue, _, _ = turns()
    asked = [begin(queue) for _ in range(4)]
    for number in range(4):
        assert [waits(each) for each in asked[number:]] == [False, *[True] * (3 - number)]
        queue.end(begun(asked[number]))


@pytest.mark.parametrize(
    ("workers", "nbytes", "at_once"),
    [(16, IN_FLIGHT // 4, 4), (16, IN_FLIGHT, 1), (4, IN_FLIGHT // 4, 2), (2, NBYTES, 1)],
)
def test_a_few_that_are_not_so_large_arrive_at_once_but_of_half_of_the_workers(workers: int, nbytes: int, at_once: int) -> None:
    """One alone begins slowly on a far network."""
    loop: Any = Clock()
    queue = Turns[object](lambda slow: object(), lambda turn: None, loop, lambda: 0.0, lambda: workers, small=0)
    asked = [queue.begin(f"worker {number}", nbytes) for number in range(9)]
    assert [isinstance(each, PlainFuture) for each in asked] == [False] * at_once + [True] * (9 - at_once)


@pytest.mark.parametrize(
    ("connection", "together", "filled"),
    [(1.0, 1.3, 0.99), (0.6, 2.3, 0.95), (0.25, 4.0, 0.95)],
    ids=["one fills the link", "two fill it", "four fill it"],
)
def test_as_many_go_beside_each_other_as_fill_the_link(connection: float, together: float, filled: float) -> None:
    """Eight workers send without pause for 400 s. A connection carries at most this share of the link, which carries a transfer
    in a second. At most `together` are under way on average, and this much of the link is `filled`."""
    loop, clients, step = Clock(), range(8), 0.02
    queue = Turns[object](lambda slow: object(), lambda turn: None, loop, lambda: loop.now, lambda: 8, small=0)  # type: ignore[arg-type]
    asked: dict[int, Any] = {client: queue.begin(str(client), IN_FLIGHT) for client in clients}
    left = dict.fromkeys(clients, 1.0)
    busy = carried = 0.0
    while loop.now < 400:
        loop.now += step
        active = [client for client in clients if not isinstance(asked[client], PlainFuture) or asked[client].done()]
        busy += len(active) * step
        for client in active:
            moved = step * min(connection, 1 / len(active))
            left[client], carried = left[client] - moved, carried + moved
            if left[client] <= 0:
                queue.end(asked[client].result() if isinstance(asked[client], PlainFuture) else asked[client])
                asked[client], left[client] = queue.begin(str(client), IN_FLIGHT), 1.0
    assert busy / loop.now <= together
    assert carried / loop.now >= filled


def test_small_gradients_wait_for_nobody() -> None:
    core = make_core()
    start(core, ["ann", "bob"])
    queue = Uploads(core.memory, Clock(), lambda: 0.0, lambda: 9)  # type: ignore[arg-type]
    assert not any(waits(begin(queue)) for _ in range(2))


def test_the_next_begins_a_little_before_the_last_bytes() -> None:
    queue, _, _ = turns()
    first, second = begun(begin(queue)), begin(queue)
    count = queue.count_bytes(first, NBYTES)
    count(NBYTES // 2)
    assert waits(second)
    count(NBYTES // 2 - 4)
    assert not waits(second)
    assert AHEAD < 16 << 20  # a server of large models would hold them all at once


def test_memory_is_used_again_only_once_the_call_the_queue_and_the_log_have_released_it() -> None:
    queue, core, _ = turns(workers=1)
    first = begun(begin(queue))
    memory = first.gradient
    first.hold()  # the queue
    first.hold()  # the log
    queue.end(first)
    second = begin(queue)
    for _ in range(3):
        assert waits(second)
        first.release()
    assert begun(second).gradient is memory
    assert core.memory.uploads == NBYTES


def test_a_client_that_sends_slowly_keeps_its_memory_and_loses_its_turn() -> None:
    queue, core, clock = turns(workers=1)
    slow, waiting = begun(begin(queue)), begin(queue)
    clock.now = FIRST
    queue.end_slow_turns()
    assert waits(waiting)
    clock.now = FIRST + 0.01
    queue.end_slow_turns()
    assert begun(waiting).gradient is not slow.gradient
    assert core.memory.uploads == 2 * NBYTES
    for upload in (slow, begun(waiting)):
        queue.end(upload)
        upload.release()
    assert core.memory.uploads == NBYTES


def test_how_long_a_turn_lasts_follows_from_the_fastest_ones() -> None:
    queue, _, clock = turns()
    first = begun(begin(queue))
    clock.now = 1.0
    queue.end(first)
    begun(begin(queue))
    waiting = begin(queue)
    clock.now = 1.0 + PATIENCE * 1.0 + GRACE
    queue.end_slow_turns()
    assert waits(waiting)
    clock.now += 0.01
    queue.end_slow_turns()
    assert not waits(waiting)


def test_who_was_slow_holds_nobody_up_the_next_time_and_is_fast_again_once_it_was() -> None:
    queue, _, clock = turns()
    first = begun(begin(queue))
    clock.now = 1.0
    queue.end(first)  # how fast this network is
    slow = begun(begin(queue, "slow"))
    clock.now += PATIENCE + GRACE + 0.01
    queue.end(slow)
    assert not any(waits(begin(queue, client)) for client in ("slow", "ann"))  # beside each other
    assert waits(begin(queue, "bob"))
    queue, _, clock = turns()
    for took in (1.0, PATIENCE + GRACE + 0.01, 1.0):  # fast, slow, fast
        slot = begun(begin(queue, "slow"))
        clock.now += took
        queue.end(slot)
    assert not waits(begin(queue, "slow"))
    assert waits(begin(queue, "ann"))


def test_a_client_that_has_left_is_not_remembered() -> None:
    queue, _, clock = turns()
    for took in (1.0, PATIENCE + GRACE + 0.01):
        slot = begun(begin(queue))
        clock.now += took
        queue.end(slot)
    queue.forget("ann")
    begun(begin(queue))
    assert waits(begin(queue, "bob"))


def test_the_pace_counts_bytes() -> None:
    """A worker that sends float32 is not slow because another one sends int8."""
    queue, _, clock = turns()
    slot = begun(queue.begin("int8", NBYTES // 4))
    clock.now = 0.25
    queue.end(slot)
    begun(begin(queue))
    waiting = begin(queue, "bob")
    clock.now += PATIENCE * 1.0
    queue.end_slow_turns()
    assert waits(waiting)
    clock.now += GRACE + 0.01
    queue.end_slow_turns()
    assert not waits(waiting)


def test_slow_clients_get_no_memory_beyond_the_limit() -> None:
    queue, core, clock = turns(workers=1, limit=NBYTES)
    asked = [begin(queue) for _ in range(3)]
    for _ in range(3):
        clock.now += FIRST + 1
        queue.end_slow_turns()
    assert [waits(each) for each in asked] == [False, False, True]
    assert core.memory.held <= core.memory.limit


def test_a_gradient_that_waits_for_too_long_begins_beside_others() -> None:
    queue, _, clock = turns()
    first = begun(begin(queue))
    clock.now = 5.0
    queue.end(first)  # turns are long here
    begun(begin(queue))
    waiting = begin(queue)
    clock.now = 5.0 + LONGEST + 0.01
    queue.end_slow_turns()
    assert not waits(waiting)


@pytest.mark.parametrize("due", [False, True])
def test_a_call_that_ends_while_it_waits_leaves_its_place_to_the_next(due: bool) -> None:
    queue, core, _ = turns()
    first, gone, last = begun(begin(queue)), begin(queue), begin(queue)
    assert isinstance(gone, PlainFuture)
    if due:
        queue.end(first)
    queue.give_up(gone)  # type: ignore[arg-type]
    queue.end(first)
    assert not waits(last)
    for upload in (first, begun(last)):
        upload.release()
    assert core.memory.uploads == 2 * NBYTES
    assert len(queue._free) == 2


def test_who_waits_while_the_machine_has_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, _, _ = turns()
    first, waiting = begun(begin(queue)), begin(queue)

    def none(size: int) -> None:
        raise MemoryError

    monkeypatch.setattr("gem_server.core.memory_budget.empty", none)
    queue.end(first)
    with pytest.raises(Overloaded, match="no memory for a gradient"):
        begun(waiting)


def test_memory_goes_with_the_workers() -> None:
    queue, core, _ = turns(workers=3)
    uploads = []
    for _ in range(3):
        uploads.append(begun(begin(queue)))
        queue.end(uploads[-1])
    for lease in list(core.leases.live)[1:]:
        core.leave(lease)
    for upload in uploads:
        upload.release()
    assert core.memory.uploads == NBYTES
    assert np.isfinite(core.memory.held)


def test_a_run_has_a_buffer_for_each_worker_if_they_are_small_and_four_if_they_are_large() -> None:
    assert upload_buffers(100, 100 << 20) == 4
    assert upload_buffers(3, 100 << 20) == 3
    assert upload_buffers(100, 1 << 10) == 100
    assert upload_buffers(100, 1 << 20) == 64


def test_slow_transfers_that_wait_hold_up_no_others_nor_others_them() -> None:
    loop: Any = Clock()
    refused: set[str] = {"slow"}
    acquire = lambda turn: None if turn.client in refused else object()  # noqa: E731
    queue = Turns[object](acquire, lambda slot: None, loop, lambda: loop.now, lambda: 2, small=0)
    queue._slow = {"slow", "slow too"}
    slow, first, second = (queue.begin(client, NBYTES) for client in ("slow", "first", "second"))
    assert [isinstance(each, PlainFuture) for each in (slow, first, second)] == [True, False, True]
    refused.clear()
    assert not isinstance(queue.begin("slow too", NBYTES), PlainFuture)
    assert isinstance(slow, PlainFuture)
    assert slow.done()


def test_a_transfer_on_the_servers_machine_says_nothing_of_the_networks_pace() -> None:
    queue, _, clock = turns()
    queue.end(begun(queue.begin("near", NBYTES, nearby=True)))  # in no time
    first = begin(queue)
    clock.now += FIRST - 0.1
    waiting = begin(queue, "bob")
    queue.end_slow_turns()
    assert waits(waiting)
    queue.end(begun(first))
    assert not waits(waiting)
