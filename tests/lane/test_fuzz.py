"""Hundreds of hostile conversations on each lane: typed errors or closed connections, the same θ, and nothing left behind."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fuzz.mutations import mutated
from gem_api.v1 import tensors_pb2
from gem_server.lane.connection import HELLO_SECONDS
from kit.raw_client import SMALL, Wire, Worker, theta_bits
from kit.raw_lane import COMMIT, HELLO, LaneFailed, RawLane, header, hello, message, offer, tcp, unix
from kit.server import Live, wait_until
from kit.ways import all_lanes

P = SMALL.size
AT_ONCE = 8


def pieces(victim: Worker) -> list[bytes]:
    """What a client of this lease might send, in bytes. Gradients are all NaN: none may ever be applied."""
    poison = np.full(P, np.nan, "<f4").tobytes()
    head = header(victim).SerializeToString()
    other = header(victim, wire_dtype=tensors_pb2.WIRE_DTYPE_INT8_BLOCK).SerializeToString()
    return [
        message(COMMIT, head, 4 * P) + poison,
        message(COMMIT, header(victim, sequence=2**64 - 1).SerializeToString(), 4 * P) + poison,
        message(COMMIT, header(victim, lease_id=victim.lease_id[:-1]).SerializeToString(), 4 * P) + poison,
        message(COMMIT, other, len(poison)) + poison,
        message(COMMIT, head, 2**64 - 1),
        message(COMMIT, header(victim, sequence=2**64 - 1).SerializeToString()),
        message(HELLO, b""),
        message(99, head, 8) + bytes(8),
        poison,
    ]


def conversation(dice: random.Random, victim: Worker, token: bytes) -> list[bytes]:
    """A hello, right or not, and what comes after it."""
    said = pieces(victim)
    match dice.randrange(4):
        case 0:
            return [dice.randbytes(dice.randrange(1, 200))]
        case 1:
            return [mutated(dice, hello(token)), *dice.choices(said, k=dice.randrange(3))]
        case 2:
            return [hello(token), *dice.choices(said, k=dice.randrange(1, 4))]
        case _:
            return [hello(token), *(mutated(dice, part) for part in dice.choices(said, k=dice.randrange(1, 4)))]


def outcome(lane: RawLane, said: list[bytes], dice: random.Random) -> str:
    """Says it, in pieces cut anywhere, and reads to the end: the error's name, or how the connection ended."""
    data = b"".join(said)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randrange(4)))
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            lane.send(data[begin:end])
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has ended it: its last message says why
    lane.hang_up()
    refusal = None
    try:
        while True:
            lane.receive()
    except LaneFailed as failed:
        refusal = failed.refusal
    except EOFError:
        return "closed"
    assert refusal.error not in {"", "UNSPECIFIED"}
    assert refusal.details
    return refusal.error


@pytest.mark.shared_memory
@all_lanes
@pytest.mark.parametrize("conversations", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_fuzzed_conversations_get_typed_errors_and_change_nothing(
    conversations: int, way: str, live: Live, wire: Wire, worker: Worker
) -> None:
    live.on_loop(lambda: setattr(live.core.leases, "duration", 1e6))  # the storm may take long on a slow machine
    worker.commit()
    victims = [wire.join(f"victim {number}") for number in range(AT_ONCE)]
    for victim in victims:
        victim.pull()
    before, held, files = theta_bits(live), live.on_loop(lambda: live.core.memory.held), descriptors()

    def caller(number: int) -> Counter[str]:
        dice, seen = random.Random(f"{way} {number}"), Counter[str]()
        for _ in range(conversations // AT_ONCE):
            victim = victims[number]
            offered = offer(victim)
            with unix(offered.socket) if way == "memory" else tcp(offered.port) as lane:
                seen[outcome(lane, conversation(dice, victim, offered.token), dice)] += 1
        return seen

    with ThreadPoolExecutor(AT_ONCE) as threads:
        seen = sum(threads.map(caller, range(AT_ONCE)), Counter[str]())

    expected = {"INVALID_REQUEST", "SEQUENCE_GAP", "PERMISSION_DENIED", "INCOMPLETE_TRANSFER", "closed"}
    assert expected | ({"NON_FINITE_GRADIENT"} if way == "tcp" else set()) <= seen.keys(), seen
    assert theta_bits(live) == before
    assert worker.commit()[0].version == before[0] + 1
    lanes = live.server.wiring.lane
    live.clock.advance(HELLO_SECONDS + 1)
    wait_until(lambda: live.lanes <= 1, "all connections but the worker's to end")
    assert live.on_loop(lambda: len(lanes._pending)) == 0
    for victim in victims:
        victim.leave()
    alone = held - sum(4 * P * 3 for _ in victims)
    wait_until(lambda: live.on_loop(lambda: live.core.memory.held) <= alone, "all memory of others to be freed")
    wait_until(lambda: descriptors() <= files + 8, "all descriptors to be closed")
    assert worker.commit()[0].version == before[0] + 2


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
