"""The lane's TCP port: which one it takes."""

from __future__ import annotations

import socket
import time

import pytest
import structlog
from gem_server.config import ServerConfig, StartError
from gem_server.lane.listener import Listener
from kit.raw_client import wired
from kit.server import config, serving


def test_a_taken_port_is_replaced_by_a_free_one_unless_the_user_named_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listener = Listener(address, "", time.monotonic, structlog.get_logger(), insist=False)
        try:
            assert listener.port not in (0, taken.getsockname()[1])
            assert listener.address == f"127.0.0.1:{listener.port}"
        finally:
            listener.close()
        with pytest.raises(StartError, match=f"can't listen on {address} for the lane: give another lane_listen"):
            Listener(address, "", time.monotonic, structlog.get_logger())


def test_a_host_that_is_not_this_machines_is_no_taken_port() -> None:
    with pytest.raises(StartError, match=r"can't listen on 192\.0\.2\.1:50052 for the lane"):
        Listener("192.0.2.1:50052", "", time.monotonic, structlog.get_logger(), insist=False)


def test_the_usual_port_is_the_one_after_that_of_grpc() -> None:
    assert ServerConfig(listen="10.0.0.1:50051").lane_address == "10.0.0.1:50052"


@pytest.mark.parametrize("every", ["0.0.0.0:0", "[::]:0"])
def test_grpc_and_the_lane_on_every_address_are_reached_by_both_families(every: str) -> None:
    with serving(config(listen=every, lane_listen=every)) as live, wired(live) as wire:
        worker = wire.started("worker")
        for port in (int(live.address.rpartition(":")[2]), live.server.wiring.lane.listener.port):
            for host in ("127.0.0.1", "::1"):
                with socket.create_connection((host, port)):
                    pass
        assert worker.commit()[0].version == 1
