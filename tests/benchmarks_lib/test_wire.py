"""The wire of the benchmarks: packets take the time of their bits and the delay, and a full queue loses them."""

from __future__ import annotations

import multiprocessing as mp
import socket
import time
from pathlib import Path

import pytest
from kit.server import wait_until

from benchmarks.lib import wire
from benchmarks.lib.wire import Direction, size_on_wire

KILOBYTE = wire.HEADER.pack(0, 0, 0, 0, 0, 0) + bytes(1000)
DELAY = 0.02


def test_packets_wait_for_those_before_them_and_arrive_after_the_delay() -> None:
    way = Direction(rate=8e6, delay=0.5)  # a kilobyte takes a millisecond
    for _ in range(3):
        way.put(KILOBYTE, now=10.0)
    assert way.next == pytest.approx(10.501)
    assert len(way.arrived(10.5025)) == 2
    assert way.next == pytest.approx(10.503)
    assert (len(way.arrived(11.0)), way.next) == (1, float("inf"))
    way.put(KILOBYTE, now=20.0)
    assert way.next == pytest.approx(20.501)


def test_a_packet_that_is_cut_into_several_has_headers_for_each() -> None:
    headers, segment = 52, 1448
    whole = wire.HEADER.pack(1, 1, headers, segment, 0, 0) + bytes(headers + 3 * segment)
    assert size_on_wire(whole) == 3 * (headers + segment)
    assert size_on_wire(whole + b"x") == 3 * (headers + segment) + headers + 1


def test_a_full_queue_loses_packets() -> None:
    way = Direction(rate=8e6, delay=0.0, longest=0.0105)
    for _ in range(100):
        way.put(KILOBYTE, now=0.0)
    assert len(way.arrived(1.0)) == 11  # the last one waits for ten
    way.put(KILOBYTE, now=1.0)
    assert len(way.arrived(2.0)) == 1


def _echo_from_afar(folder: Path, port: int) -> None:
    wire.enter(folder)
    with socket.create_connection((wire.NEAR, port)) as connection:
        while data := connection.recv(1):
            connection.sendall(data)


@pytest.mark.skipif(not wire.possible(), reason="needs Linux, root and /dev/net/tun")
def test_a_process_behind_the_wire_is_a_round_trip_away(tmp_path: Path) -> None:
    spawned = mp.get_context("spawn")
    carrier = spawned.Process(target=wire.run, args=(tmp_path, 1e9, DELAY), daemon=True)
    carrier.start()
    try:
        wait_until(lambda: wire.is_up(tmp_path), "the wire", 60)
        with socket.create_server((wire.NEAR, 0)) as server:
            spawned.Process(target=_echo_from_afar, args=(tmp_path, server.getsockname()[1]), daemon=True).start()
            server.settimeout(60)
            connection, (host, _) = server.accept()
        with connection:
            assert host == wire.FAR
            began = time.monotonic()
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
            assert time.monotonic() - began >= 2 * DELAY
    finally:
        carrier.kill()
        carrier.join()
