"""Sessions over a lane: how they end, forks, wire formats, and that no socket or memory is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.conftest import Transport
from gem_api.wire import WIRE_FORMATS
from gem_client import GemError, InvalidRequest, Session, connect
from gem_client.transport import lane as client_lane
from kit.model import (
    ELSEWHERE,
    GRADIENT,
    PLAIN,
    SIZE,
    Array,
    Patience,
    Wire,
    ended,
    expire_all,
    in_background,
    lane_port_of,
    model,
    outcomes,
    theta,
    transports,
    version,
)
from kit.process import python
from kit.regions import held_open, mapped
from kit.server import DEADLINE, Live, config, serving, wait_until


def left_open() -> set[str]:
    """This process's open sockets and the memory that it shares, of the server's threads too."""
    gc.collect()
    found = {*mapped(os.getpid()), *held_open()}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry))
    return {name for name in found if name.isdecimal() or name.startswith("socket:")}


@contextmanager
def nothing_left_open(live: Live) -> Iterator[None]:
    """The block closes every socket that it opens, and unmaps and closes all shared memory."""
    before = left_open()
    yield

    def closed() -> bool:
        live.on_loop(live.server.wiring.lane.regions.take_back)  # the server itself does so once a second
        return left_open() <= before

    try:
        wait_until(closed, "all sockets and all memory of the block to be closed")
    except AssertionError as late:
        raise AssertionError(f"{late}; open: {left_open() - before}") from None


# -- what is left behind


def trained(live: Live) -> Session:
    session = connect(live.address)
    session.join(model())
    session.commit(GRADIENT)
    return session


def closes(session: Session) -> None:
    session.close()


def ends_with_an_error(session: Session) -> None:
    session.__exit__(RuntimeError, RuntimeError(), None)


def is_rejected_and_closes(session: Session) -> None:
    with pytest.raises(GemError):
        session.commit(np.full(SIZE, np.nan, np.float32))
    session.close()


def waits_for_the_end(session: Session) -> None:
    session.pull_final()
    session.close()


def is_forgotten(session: Session) -> None:
    """Nobody closes it."""


def test_sessions_leave_no_socket_no_memory_and_no_lease_behind_however_they_end(transport: Transport, live: Live) -> None:
    with nothing_left_open(live):
        for end in (closes, ends_with_an_error, is_rejected_and_closes, waits_for_the_end, is_forgotten):
            session = trained(live)
            assert transports(live) == {session.name: transport.name}
            end(session)
            del session
        expire_all(live)  # until then the server keeps what belongs to the lease of the last one
    assert ended(live) == {"left": 4, "expired": 1}


@pytest.mark.long
def test_a_process_that_forgets_its_session_ends_without_a_warning(transport: Transport, live: Live) -> None:
    code = """
import sys, gem_client, numpy
session = gem_client.connect(sys.argv[1])
session.join({"w": numpy.ones(3, numpy.float32)})
session.commit(numpy.ones(3, numpy.float32))
"""
    done = python("-X", "dev", "-W", "error", "-c", code, live.address)
    assert (done.returncode, "ResourceWarning" in done.stderr) == (0, False), done.stderr


# -- closed by another thread


def test_closing_from_another_thread_ends_an_exchange_at_once(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_client.run.membership.LEAVE_SECONDS", 0.1)  # the answer to the goodbye is lost too
    with serving(config(PLAIN, **transport.settings)) as live, nothing_left_open(live), Wire(live.address, live) as wire:
        close_in_mid_exchange(live, wire)
        assert outcomes(live) == {"applied": 2}


def close_in_mid_exchange(live: Live, wire: Wire) -> None:
    with connect(wire.address, retry=Patience().retry()) as session:
        session.join(model())
        session.commit(GRADIENT)
        wire.lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 2, "the commit to be applied")  # the session waits for an answer that is lost
        in_background(session.close).result(DEADLINE)
        with pytest.raises(InvalidRequest, match="closed"):
            waiting.result(DEADLINE)


def test_a_lane_that_opens_after_its_session_was_closed_is_closed_too(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_door, go_on = threading.Event(), threading.Event()
    open_lane = client_lane.open_network_lane

    def slow(*arguments: Any) -> client_lane.Lane:
        at_the_door.set()
        assert go_on.wait(DEADLINE)
        return open_lane(*arguments)

    monkeypatch.setattr("gem_client.transport.connection.open_network_lane", slow)
    with nothing_left_open(live):
        patience = Patience()
        session = connect(live.address, retry=patience.retry())
        joining = in_background(lambda: session.join(model()))
        assert at_the_door.wait(DEADLINE)
        session._member.links.stop()  # as `close` begins: the lease is there until it has left
        go_on.set()
        wait_until(lambda: patience.pauses or joining.done(), "the session to try again")
        session.close()
        with pytest.raises(InvalidRequest, match="closed"):
            joining.result(DEADLINE)
        assert session._member.links.leader.connection.lane is None


# -- forks

FORKED = """
import gc, os, signal, sys
import numpy
from gem_client import InvalidRequest, connect

ones = numpy.ones(3, numpy.float32)
session = connect(sys.argv[1])
session.join({"w": ones})
session.commit(ones)
child = os.fork()
if not child:
    signal.alarm(60)
    status = 1
    try:
        session.commit(ones)
    except InvalidRequest:
        status = 0
    session.close()
    session._member.links.leader.connection.lane = None  # what the child's garbage collector would free
    gc.collect()
    os._exit(status)
assert os.waitpid(child, 0)[1] == 0
answer = session.commit(ones)
print(answer.version, answer.lost, session.generation)
session.close()
"""


@pytest.mark.long
def test_a_forked_child_that_closes_its_copy_leaves_the_parents_lane_alone(transport: Transport, live: Live) -> None:
    done = python("-c", FORKED, live.address, GRPC_ENABLE_FORK_SUPPORT="false", GRPC_VERBOSITY="NONE")
    assert (done.returncode, done.stdout) == (0, "2 False 1\n"), done.stderr
    assert ended(live) == {"left": 1}


# -- wire formats

LARGE = 300_001  # float32: more than one chunk


@pytest.mark.parametrize(("dtype", "again"), [("int8", "lane"), ("int8", "grpc"), ("bfloat16", "lane")])
def test_a_gradient_that_breaks_off_halfway_is_sent_again_with_the_same_bytes(dtype: str, again: str) -> None:
    """int8 carries its rounding error over: a resend that was encoded anew with it would be another gradient."""
    gradients: Array = np.random.default_rng(9).standard_normal((4, LARGE), np.float32)
    half = WIRE_FORMATS[dtype].nbytes(LARGE) // 2

    def played(breaks: bool) -> bytes:
        with (
            serving(config(PLAIN)) as live,
            Wire(live.address, live) as wire,
            connect(wire.address, retry=Patience().retry(), gradient_dtype=dtype) as session,
        ):
            session.join({"w": np.zeros(LARGE, np.float32)})
            for number, gradient in enumerate(gradients):
                if breaks and (number in (1, 2) if again == "lane" else number == 2):
                    wire.lanes[0].cut_after(half, for_good=again == "grpc")
                assert session.commit(gradient).version == number + 1
            assert transports(live) == {session.name: "tcp" if again == "lane" or not breaks else "grpc"}
            assert (outcomes(live)["applied"], session.generation) == (4, 1)
            return theta(live).tobytes()

    assert played(breaks=True) == played(breaks=False)


def test_the_lanes_port_is_on_the_host_that_grpc_was_reached_at(live: Live) -> None:
    """The server knows no name of itself that holds for every worker."""
    with Wire(live.address, live) as wire, connect(wire.address) as session:
        session.join(model())
        lane = session._member.links.leader.connection.lane
        assert lane is not None
        assert lane._sock.getpeername() == (ELSEWHERE, lane_port_of(live))


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("server:50051", "server"),
        ("[::1]:50051", "::1"),
        ("dns:///server.example:50051", "server.example"),
        ("dns:server:50051", "server"),
        ("ipv6:[fe80::1]:50051", "fe80::1"),
        *[(address, "") for address in ("unix:/run/gem.sock", "ipv4:10.0.0.1:1,10.0.0.2:1", "xds:///server", "vsock:3:50051")],
    ],
)
def test_a_lane_is_on_the_host_that_an_address_of_grpc_names_if_it_names_one(address: str, host: str) -> None:
    with nullcontext() if host else pytest.raises(OSError, match="names no host"):
        assert client_lane._host_of(address) == host
