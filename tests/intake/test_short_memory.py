"""Uploads under a memory limit, with simulated clients and time: those that stall give way, steady ones go on and finish, and
fast ones always have a buffer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from gem_api.errors import Overloaded
from gem_api.layout import Layout
from gem_server.core.uploads import STALLED, Upload
from gem_server.intake.turns import LONGEST
from gem_server.intake.uploads import Uploads
from kit.core import make_core, start

CHUNK = 1 << 20
NBYTES = 16 * CHUNK
MBIT = 125_000  # bytes a second
STEP = 0.25  # seconds between two looks


@dataclass
class Client:
    """Sends one gradient after the other.

    Attributes:
        lease: Its lease.
        rate: Bytes a second that it sends.
        stops_at: Bytes after which it sends no more.
        frame: Bytes that the server sees at once.
        pause: Seconds between two gradients.
        fresh: Whether it takes a new lease for each try, so that nobody knows it.
    """

    lease: str
    rate: float = 800 * MBIT
    stops_at: float = NBYTES
    frame: int = CHUNK
    pause: float = 1.0
    fresh: bool = False
    asked: Any = None
    sent: float = 0.0
    seen: int = 0
    next_at: float = 0.0
    asked_at: float = 0.0
    waits: list[float] = field(default_factory=list)  # from the wish to send a gradient until its last byte
    told: int = 0  # to repeat, before its gradient began to arrive
    ended: int = 0  # while it arrived
    count: Callable[[int], None] = print

    @property
    def upload(self) -> Upload | None:
        if isinstance(self.asked, Future):
            return self.asked.result() if self.asked.done() else None
        return self.asked  # type: ignore[no-any-return]


class World:
    """A server with a memory limit, its clients, and the time."""

    def __init__(self, clients: list[Client], buffers: int = 4) -> None:
        self.now, self.clients, self.numbers = 0.0, clients, count()
        core = make_core()
        start(core, [f"worker-{number}" for number in range(buffers)], Layout.of({"w": (NBYTES // 4,)}))
        core.memory.limit = core.memory.held
        self.memory = core.memory
        assert core.memory.most_uploads == buffers
        self.uploads = Uploads(core.memory, self, lambda: self.now, lambda: len(clients))  # type: ignore[arg-type]

    def create_future(self) -> Future[Any]:
        return Future()

    def call_soon_threadsafe(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            self.uploads.end_slow_turns()
            self._end(self.uploads.to_end())
            for client in self.clients:
                self._step(client)
            assert self.memory.held <= self.memory.limit or not self.memory.limit

    def _step(self, client: Client) -> None:
        if client.asked is None:
            if self.now >= client.next_at:
                self._ask(client)
            return
        if isinstance(client.asked, Future) and client.asked.done() and client.asked.exception():
            assert isinstance(client.asked.exception(), Overloaded)
            client.told, client.asked, client.next_at = client.told + 1, None, self.now + 1.0
            return
        upload = client.upload
        if upload is None:
            return
        if not client.seen and not client.sent:
            client.count = self.uploads.count_bytes(upload, NBYTES)
        client.sent = min(client.sent + client.rate * STEP, client.stops_at)
        while client.seen + client.frame <= client.sent:
            client.count(client.frame)
            client.seen += client.frame
        if client.seen >= NBYTES:
            client.waits.append(self.now - client.asked_at)
            self._leave(client, self.now + client.pause)
            client.asked_at = 0.0

    def _ask(self, client: Client) -> None:
        if client.fresh:
            self.uploads.forget(client.lease)
            client.lease = f"lease {next(self.numbers)}"
        client.asked_at = client.asked_at or self.now
        client.asked, client.sent, client.seen = self.uploads.begin(client.lease, NBYTES), 0.0, 0

    def _leave(self, client: Client, next_at: float) -> None:
        upload, client.asked, client.next_at = client.upload, None, next_at
        assert upload is not None
        self.uploads.end(upload)
        upload.release()

    def _end(self, lease: str | None) -> None:
        for client in self.clients:
            if client.lease == lease:
                client.ended += 1
                self._leave(client, self.now)


ATTACKS = {
    "a chunk": {"stops_at": CHUNK},
    "all but the last chunk": {"stops_at": NBYTES - CHUNK},
    "nothing": {"stops_at": 0},
    "drops": {"rate": 10.0, "frame": 1},
    "new leases": {"stops_at": CHUNK, "fresh": True},
}


def attackers(attack: str, number: int) -> list[Client]:
    return [Client(f"stalls {each}", **ATTACKS[attack]) for each in range(number)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attack", "number", "buffers"), [*((attack, 12, 4) for attack in ATTACKS), ("a chunk", 4, 4), ("a chunk", 4, 2)]
)
def test_clients_that_stall_and_try_again_at_once_starve_neither_fast_nor_steady_ones(
    attack: str, number: int, buffers: int
) -> None:
    """1 Mbit/s takes 134 s for this gradient."""
    fast, steady = Client("fast"), Client("steady", rate=MBIT)
    World([*attackers(attack, number), steady, fast], buffers).run(300.0)
    assert fast.ended == 0
    assert fast.waits[0] < 60  # until the server knows who is slow
    assert max(fast.waits[1:]) < 10
    assert steady.ended <= 2  # in the buffer that is kept for others, before it is known as slow
    assert steady.waits[0] < 300


def test_with_room_for_one_gradient_stalled_ones_give_way_and_steady_ones_finish() -> None:
    fast, steady, slow = Client("fast"), Client("steady", rate=MBIT), attackers("a chunk", 2)
    World([*slow, steady, fast], buffers=1).run(400.0)
    assert (steady.ended, fast.ended) == (0, 0)
    assert len(steady.waits) >= 2
    assert len(fast.waits) >= 2
    assert sum(client.ended for client in slow) >= 2


def test_without_anybody_who_waits_for_memory_no_upload_is_ended() -> None:
    slow, fast = attackers("a chunk", 3), Client("fast")
    World([*slow, fast]).run(60.0)
    assert [client.ended for client in slow] == [0, 0, 0]
    assert len(fast.waits) > 30


def test_without_a_limit_nobody_waits_for_memory() -> None:
    """Not even for those that stall once their turn is over."""
    slow, fast = attackers("all but the last chunk", 9), Client("fast")
    world = World([*slow, fast])
    world.memory.limit = 0
    world.run(30.0)
    assert sum(client.ended for client in slow) == 0
    assert fast.told == 0
    assert len(fast.waits) > 10


def test_a_client_that_is_told_to_ask_again_keeps_its_place() -> None:
    world = World([], buffers=1)
    holder, early = world.uploads.begin("holder", NBYTES), world.uploads.begin("early", NBYTES)
    world.now = 5.0
    late = world.uploads.begin("late", NBYTES)
    world.now = LONGEST + 0.1
    world.uploads.end_slow_turns()
    assert isinstance(early, Future)
    with pytest.raises(Overloaded, match="no memory for this gradient was free for 10 s"):
        early.result(0)
    early = world.uploads.begin("early", NBYTES)
    assert isinstance(holder, Upload)
    world.uploads.end(holder)
    holder.release()
    assert isinstance(early, Future)
    assert isinstance(late, Future)
    assert (early.done(), late.done()) == (True, False)


def begun(world: World, client: str) -> Upload:
    upload = world.uploads.begin(client, NBYTES)
    assert isinstance(upload, Upload)
    return upload


def test_who_stalls_after_its_turn_is_known_as_slow() -> None:
    world = World([], buffers=4)
    upload = begun(world, "all but the last chunk")
    world.uploads.count_bytes(upload, NBYTES)(NBYTES - CHUNK)
    world.now = 100.0
    world.uploads.end(upload)
    assert world.uploads._slow == {"all but the last chunk"}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("nbytes", [CHUNK, NBYTES - CHUNK], ids=["in its turn", "after its turn"])
def test_a_lease_that_ends_while_its_gradient_arrives_or_waits_is_not_remembered(nbytes: int, told: bool) -> None:
    world = World([], buffers=1)
    upload = begun(world, "arrives")
    world.uploads.count_bytes(upload, NBYTES)(nbytes)
    waiting = world.uploads.begin("waits", NBYTES)
    assert isinstance(waiting, Future)
    world.now = LONGEST + 1
    if told:
        world.uploads.end_slow_turns()
    for lease in ("arrives", "waits"):
        world.uploads.forget(lease)
    world.now += STALLED
    world.uploads.end_slow_turns()
    assert world.uploads.to_end() is None  # its memory is free soon anyway
    world.uploads.give_up(waiting)  # type: ignore[arg-type]
    world.uploads.end(upload)
    assert (world.uploads._slow, world.uploads._places, world.uploads._arriving) == (set(), {}, {})


def test_who_waits_for_a_turn_does_not_count_as_waiting_for_memory() -> None:
    world = World([], buffers=2)
    world.uploads._slow = {"slow 1", "slow 2"}
    begun(world, "slow 1")
    slow, _ = world.uploads.begin("slow 2", NBYTES), begun(world, "fast 1")
    fast = world.uploads.begin("fast 2", NBYTES)
    assert isinstance(slow, Future)
    assert isinstance(fast, Future)
    assert world.uploads.waiting_for_memory == 1
