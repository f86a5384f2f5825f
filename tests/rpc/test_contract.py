"""Clients and servers of different releases: each says at registration what to upgrade."""

from __future__ import annotations

import logging

import grpc
import pytest
from gem_api import __version__
from gem_api.formats import CONTRACT
from gem_api.v1 import training_pb2 as pb
from gem_client import connect
from kit.core import SMALL
from kit.logs import captured
from kit.model import PLAIN, model
from kit.server import config, serving
from kit.ways import wired


def registration(**fields: object) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(worker_name="ann", layout=SMALL.to_message(), **fields)  # type: ignore[arg-type]


def test_a_client_of_a_higher_contract_is_refused_with_both_releases() -> None:
    with serving(config(PLAIN)) as live, wired(live, "grpc") as wire:
        with pytest.raises(grpc.RpcError) as caught:
            wire.call("RegisterWorker", registration(contract=CONTRACT + 1, release="9.8.7\x1b[31m"))
        assert not live.on_loop(lambda: live.core.leases.live)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == (
        f"this client, of release 9.8.7\\x1b[31m, speaks contract {CONTRACT + 1}, and this server, of release {__version__}, "
        f"up to {CONTRACT}: upgrade the server, or use a client of its release"
    )


def test_a_client_that_knows_no_number_is_served_and_named_in_the_log() -> None:
    with captured(logging.INFO) as lines, serving(config(PLAIN)) as live, wired(live, "grpc") as wire:
        answer = wire.call("RegisterWorker", registration())
        assert (answer.contract, answer.release) == (CONTRACT, __version__)
        status = wire.call("GetStatus", pb.GetStatusRequest())
        assert (status.contract, status.server_version) == (CONTRACT, __version__)
    (line,) = [line for line in lines if line["event"] == "worker registered"]
    assert line["upgrade"].startswith("the worker is of release (unknown) with contract 1, ")
    assert line["upgrade"].endswith(f"with contract {CONTRACT}: upgrade the worker")


def test_a_client_says_that_its_server_is_of_an_earlier_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's answer has no number."""
    with serving(config(PLAIN)) as live:
        with connect(live.address) as session:
            session.join(model())
        assert "upgrade" not in caplog.text
        monkeypatch.setattr("gem_server.intake.messages.CONTRACT", 0)
        monkeypatch.setattr("gem_server.intake.messages.__version__", "")
        with connect(live.address) as session:
            session.join(model())
    (line,) = [record.getMessage() for record in caplog.records if "upgrade" in record.getMessage()]
    assert line == (
        f"the server is of release (unknown) with contract 1, and this is release {__version__} with contract {CONTRACT}: "
        "upgrade the server"
    )
