"""The socket that gives shared memory to workers: its address, its tokens, and clients that misbehave."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_server.config import StartError
from gem_server.rpc import memory_socket
from live import DEADLINE, Live, config, serving, wait_until
from region_client import (
    ENDS,
    abstract,
    handed_over,
    linux_only,
    memory_bytes,
    offered,
    shared,
    shares,
    visit,
)
from wire_client import SMALL, Wire, Worker, wired

pytestmark = linux_only

P = SMALL.size
THETA = 4 * P
EACH = 3 * 4 * P  # the proxy's moment, the snapshot and the gradient that arrives in chunks
REGION = 3 * 4096  # a page each for the name, the gradient and the answer


@pytest.fixture
def live() -> Iterator[Live]:
    """A server that shares memory."""
    with serving(config(memory_socket=abstract())) as server:
        yield server


def visitors(live: Live) -> int:
    """Connections to the memory socket that the server has taken and not ended."""
    return live.on_loop(lambda: len(live.server.parts.memory_socket._visitors))


# -- tokens


def test_a_token_is_good_for_one_region(worker: Worker) -> None:
    offer = offered(worker)
    first = handed_over(visit(offer.socket, offer.token))
    assert first is not None
    os.close(first)
    assert handed_over(visit(offer.socket, offer.token)) is None
    assert shares(worker)


def test_a_newer_token_is_good_in_place_of_an_older_one(worker: Worker) -> None:
    older, newer = offered(worker), offered(worker)
    assert older.token != newer.token
    assert handed_over(visit(older.socket, older.token)) is None
    descriptor = handed_over(visit(newer.socket, newer.token))
    assert descriptor is not None
    os.close(descriptor)


@pytest.mark.parametrize("end", ENDS)
def test_a_token_of_a_lease_that_has_ended_gives_nothing(end: str, live: Live, worker: Worker) -> None:
    offer = offered(worker)
    ENDS[end](live, worker)
    before = memory_bytes(live)
    assert handed_over(visit(offer.socket, offer.token)) is None
    assert memory_bytes(live) == before
    again = worker.wire.join("again")
    assert shares(again)


def test_a_region_is_that_of_the_lease_whose_token_was_shown(live: Live, wire: Wire, worker: Worker) -> None:
    other = wire.join("other")
    other.pull()
    mine, others = shared(worker), shared(other)
    assert mine.commit()[0].version == 1
    assert others.commit()[0].version == 2
    assert wire.whole("Commit", worker.header(region=others.nonce)).refusal().error == "UNKNOWN_REGION"
    mine.close()
    others.close()


def test_a_server_that_shares_none_says_so() -> None:
    with serving(config(memory_socket="")) as live, wired(live) as wire:
        worker = wire.started("worker")
        refusal = wire.refusal("ShareMemory", pb.ShareMemoryRequest(lease_id=worker.lease_id))
        assert (refusal.error, "over the network" in refusal.details) == ("INVALID_REQUEST", True)
        assert worker.commit()[0].version == 1


def test_asking_for_memory_is_a_sign_of_life(live: Live, worker: Worker) -> None:
    live.clock.advance(0.6 * live.config.lease_seconds)
    offered(worker)
    live.clock.advance(0.6 * live.config.lease_seconds)
    live.on_loop(live.server.parts.training.expire_leases)
    assert worker.commit()[0].version == 1


# -- visitors of every kind


def say(*said: bytes) -> Callable[[Worker], socket.socket]:
    """A visitor that says this and hangs up."""
    return lambda worker: visit(offered(worker).socket, *said)


def with_token(change: Callable[[bytes], bytes]) -> Callable[[Worker], socket.socket]:
    """A visitor that says something made of the right token, and hangs up."""

    def go(worker: Worker) -> socket.socket:
        offer = offered(worker)
        return visit(offer.socket, change(offer.token))

    return go


STRANGERS: dict[str, Callable[[Worker], socket.socket]] = {
    "says nothing": say(),
    "says one byte": say(b"x"),
    "says half a token": with_token(lambda token: token[:8]),
    "says all but the last byte": with_token(lambda token: token[:-1]),
    "says a token of zeros": say(bytes(16)),
    "has one bit wrong": with_token(lambda token: token[:-1] + bytes([token[-1] ^ 1])),
    "says the token backwards": with_token(lambda token: token[::-1] if token != token[::-1] else bytes(16)),
    "says something before the token": with_token(lambda token: b"\0" + token),
    "says the name of the lease": lambda worker: visit(offered(worker).socket, worker.lease_id.encode()),
    "speaks HTTP": say(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_gets_nothing_and_stops_no_one(kind: str, live: Live, worker: Worker) -> None:
    before = memory_bytes(live)
    visitor = STRANGERS[kind](worker)
    visitor.shutdown(socket.SHUT_WR)
    assert handed_over(visitor) is None
    wait_until(lambda: visitors(live) == 0, "the visit to end")
    assert memory_bytes(live) == before
    assert shares(worker)


def test_a_token_that_comes_byte_by_byte_is_as_good(worker: Worker) -> None:
    offer = offered(worker)
    descriptor = handed_over(visit(offer.socket, *(bytes([byte]) for byte in offer.token)))
    assert descriptor is not None
    os.close(descriptor)


def test_what_is_said_after_the_token_does_not_matter(worker: Worker) -> None:
    offer = offered(worker)
    descriptor = handed_over(visit(offer.socket, offer.token + bytes(100_000)))
    assert descriptor is not None
    os.close(descriptor)


def test_who_hangs_up_before_the_memory_comes_can_ask_again_and_nothing_is_left(live: Live, worker: Worker) -> None:
    for _ in range(20):
        offer = offered(worker)
        visit(offer.socket, offer.token).close()
    wait_until(lambda: visitors(live) == 0, "the visits to end")
    assert memory_bytes(live) <= THETA + EACH + REGION
    kept = live.on_loop(lambda: [lease.offered for lease in live.core.leases.live.values() if lease.offered])
    assert len(kept) <= 1
    del kept
    region = shared(worker)
    assert region.commit()[0].version == 1
    region.close()


def test_a_visitor_that_says_nothing_is_sent_away(live: Live, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_socket, "PATIENCE_SECONDS", 0.05)
    assert handed_over(visit(offered(worker).socket)) is None  # though it never hangs up itself
    wait_until(lambda: visitors(live) == 0, "the visit to end")


def test_a_hundred_silent_visitors_hold_an_honest_one_up_for_no_longer_than_the_patience(
    live: Live, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are slots for 64; the silent ones are sent away, and the honest one behind them has its turn."""
    monkeypatch.setattr(memory_socket, "PATIENCE_SECONDS", 0.2)
    address = offered(worker).socket
    with ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(visit(address))
        assert visitors(live) <= memory_socket.MAX_VISITORS
        wait_until(lambda: shares(worker), "the honest one to have its turn")
        assert worker.commit()[0].version == 1


def test_a_hundred_workers_that_come_at_once_all_get_their_memory(live: Live, wire: Wire, worker: Worker) -> None:
    """However long the server is busy with something else meanwhile."""
    offers = [offered(wire.join(f"worker {number}")) for number in range(100)]
    with ExitStack() as all_of_them:

        def come() -> list[socket.socket]:
            return [all_of_them.enter_context(at_once(offer.socket)) for offer in offers]

        visitors = live.on_loop(come)
        for visitor, offer in zip(visitors, offers, strict=True):
            visitor.sendall(offer.token)
        for visitor in visitors:
            descriptor = handed_over(visitor)
            assert descriptor is not None
            os.close(descriptor)


def test_silent_visitors_hold_no_call_up(live: Live, worker: Worker) -> None:
    address = offered(worker).socket
    with ExitStack() as silent:
        for _ in range(memory_socket.MAX_VISITORS):
            silent.enter_context(visit(address))
        wait_until(lambda: visitors(live) == memory_socket.MAX_VISITORS, "every slot to be taken")
        assert worker.commit()[0].version == 1
        offered(worker)
        live.stop()  # and the end waits for none of them


def at_once(address: str) -> socket.socket:
    """A connection to a memory socket whose server need not look up to have room for it."""
    visitor = socket.socket(socket.AF_UNIX)
    visitor.setblocking(False)
    visitor.connect("\0" + address[1:])
    visitor.settimeout(DEADLINE)
    return visitor


# -- the socket's place


def started(address: str) -> int:
    """Starts a server there, has a worker share memory with it, and stops it. Returns the socket's mode."""
    with serving(config(memory_socket=address)) as live, wired(live) as wire:
        worker = wire.started("worker")
        assert offered(worker).socket == address
        assert shares(worker)
        return Path(address).stat().st_mode


def test_a_path_is_made_with_its_folder_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "s"
    mode = started(str(path))
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) & 0o666 == 0o666  # workers may run as another user
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_behind_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
        left_behind.listen()
    assert path.is_socket()
    started(str(path))
    assert not path.exists()


def test_a_path_that_another_server_answers_at_is_left_to_it(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with serving(config(memory_socket=path)) as live, wired(live) as wire:
        worker = wire.started("worker")
        with pytest.raises(StartError, match="another server answers"):
            Live(config(memory_socket=path))
        assert shares(worker)


def test_a_path_that_another_server_has_taken_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(config(memory_socket=str(path))) as first:
        path.unlink()
        with serving(config(memory_socket=str(path))) as second, wired(second) as wire:
            first.stop()
            assert path.is_socket()
            assert shares(wire.started("worker"))


def test_an_abstract_name_that_another_server_has_is_refused(live: Live, worker: Worker) -> None:
    with pytest.raises(StartError, match="--memory-socket"):
        Live(config(memory_socket=live.config.memory_socket))
    assert shares(worker)


def a_file(path: Path) -> str:
    path.write_text("mine")
    return str(path)


def a_folder(path: Path) -> str:
    path.mkdir()
    return str(path)


WRONG_PLACES: dict[str, Callable[[Path], str]] = {
    "a file": a_file,
    "a folder": a_folder,
    "below a file": lambda path: f"{a_file(path)}/s",
    "longer than a socket's name may be": lambda path: str(path) + "x" * 108,
    "an abstract name that is too long": lambda path: "@" + "x" * 108,
}


@pytest.mark.parametrize("what", WRONG_PLACES)
def test_a_place_that_can_not_be_a_socket_is_refused_and_what_is_there_stays(what: str, tmp_path: Path) -> None:
    place = WRONG_PLACES[what](tmp_path / "s")
    before = {path: path.read_text() if path.is_file() else "" for path in tmp_path.iterdir()}
    with pytest.raises(StartError, match="--memory-socket"):
        Live(config(memory_socket=place))
    assert {path: path.read_text() if path.is_file() else "" for path in tmp_path.iterdir()} == before


def test_a_server_that_can_not_start_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(StartError):
        Live(config(Hyperparameters(epochs=0, steps=0), memory_socket=str(path)))
    assert not path.exists()
