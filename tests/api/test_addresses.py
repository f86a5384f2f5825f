"""Addresses are checked before connecting, and an unreachable server is reported in plain words."""

from __future__ import annotations

import logging
import os
from unittest.mock import Mock

import click
import grpc
import pytest
from click.testing import CliRunner
from gem_api.process.addresses import server_address
from gem_api.process.printable import without_password
from gem_client import Admin, InvalidRequest, Overloaded, ServerUnavailable, connect
from gem_client.transport.channel import _nobody_there, typed_error
from gem_worker.process.trainer import run_hyperparameters
from kit.commands import COMMANDS
from kit.model import Patience
from kit.server import Live


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:50051", "localhost:1", "gem_server-1.example.com:65535", "[::1]:50051",
        "unix:/run/gem.sock", "unix-abstract:gem", "dns:///server:50051", "ipv4:10.0.0.1:50051",
    ],
)  # fmt: skip
def test_an_address_that_can_be_dialled_stays_as_it_is_and_its_default_port_is_50051(text: str) -> None:
    assert server_address(text) == text == server_address(text.removesuffix(":50051") if text[0] in "1[" else text)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "write HOST:PORT"),
        (":50051", "the host is missing: write localhost:50051"),
        ("localhost:abc", "the port 'abc' is not a number from 1 to 65535"),
        ("localhost:0", "the port '0' is not"),
        ("localhost:65536", "the port '65536' is not"),
        ("localhost:50051/", "the port '50051/' is not"),
        ("http://localhost:50051", "leave out 'http://': write localhost:50051"),
        ("fe80::1:50051", r"in brackets, as in \[::1\]:50051"),
        ("[::x]:50051", r"'\[::x\]' is not an IPv6 address"),
        ("[::1]50051", r"'\[::1\]50051' is not an IPv6 address in brackets"),
        ("my host:50051", "'my host' is not a host name"),
        ("http://user:secret@host:1", r"^an address has no user or password: write host:1$"),
        ("user:secret@host", r"^an address has no user or password: write host$"),
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused_with_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        server_address(text)


def test_the_sdk_refuses_a_wrong_address_before_it_dials() -> None:
    for attempt in (connect, Admin):
        with pytest.raises(InvalidRequest, match="leave out 'http://'"):
            attempt("http://localhost:50051")


@pytest.mark.parametrize("name", ["gem-ctl", "gem-worker", "gem-evaluator"])
def test_a_command_refuses_a_wrong_address_as_wrong_use(name: str) -> None:
    with pytest.raises(click.UsageError, match="the port 'abc' is not"):
        COMMANDS[name].make_context(name, ["--server", "localhost:abc", "status"][: 3 if name == "gem-ctl" else 2])


@pytest.fixture
def patience() -> Patience:
    patience = Patience()
    patience.run_out()
    return patience


def test_without_a_server_that_is_said_once(patience: Patience, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "gem_client"),
        connect("127.0.0.1:1", name="ann", retry=patience.retry()) as session,
        pytest.raises(ServerUnavailable) as raised,
    ):
        session.pull()
    nobody = "no server at 127.0.0.1:1 (is gem-server running?)"
    assert str(raised.value) == nobody
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"ann: {nobody}; trying again, for ")


def test_a_name_that_nobody_has_is_said_so() -> None:
    with (
        Admin("no.such.host.invalid:1") as admin,
        pytest.raises(ServerUnavailable, match=r"^the host of no\.such.* is not known"),
    ):
        admin.status()


def test_workers_that_share_host_name_and_process_id_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    named: list[str] = []

    def work(name: str, *_: object) -> tuple[int, bool]:
        named.append(name)
        return 0, False

    monkeypatch.setattr("gem_worker.process.work.work", work)
    monkeypatch.setattr("gem_worker.process.cli.log_as", named.append)
    for process_wide in ("stop_on_signals", "end_with_launcher", "logs.configure"):
        monkeypatch.setattr(f"gem_worker.process.cli.{process_wide}", lambda *_: None)
    for _ in range(2):
        assert CliRunner().invoke(COMMANDS["gem-worker"], []).exit_code == 0
    assert CliRunner().invoke(COMMANDS["gem-worker"], ["--name", "ann"]).exit_code == 0
    assert len(set(named[:4])) == 2
    assert named[4:] == ["ann", "ann"]


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("h:1: Domain name not found", "the host of h:1 is not known (is the name right?)"),
        ("h:1 os_error: Name or service not known syscall: getaddrinfo", "the host of h:1 is not known (is the name right?)"),
        ("h:1: Could not contact DNS servers", "can't look up the host of h:1 now: Could not contact DNS servers"),
        ("h:1 os_error: Temporary failure in name resolution syscall: getaddrinfo",
         "can't look up the host of h:1 now: Temporary failure in name resolution"),
    ],
)  # fmt: skip
def test_a_resolver_that_does_not_answer_is_not_a_name_that_nobody_has(why: str, said: str) -> None:
    assert _nobody_there(f"errors resolving h:1: [field:hostname lookup error:address lookup failed for {why}]", "h:1") == said


def test_a_message_that_is_too_large_for_a_proxy_is_not_an_overloaded_server() -> None:
    error = Mock()
    error.code.return_value = grpc.StatusCode.RESOURCE_EXHAUSTED
    error.details.return_value = "Received message larger than max (5 vs. 4)"
    assert isinstance(typed_error(error, "h:1"), InvalidRequest)
    error.details.return_value, error.trailing_metadata.return_value = "busy", ()
    assert isinstance(typed_error(error, "h:1"), Overloaded)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A proxy for the web, at which nobody listens."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return monkeypatch


def test_a_proxy_for_the_web_is_not_asked_for_a_server(proxied: pytest.MonkeyPatch, live: Live) -> None:
    with Admin(live.address) as admin:
        assert admin.status().run_id


def test_a_proxy_for_grpc_is_asked_and_named(proxied: pytest.MonkeyPatch) -> None:
    proxied.setenv("grpc_proxy", "http://ann:secret@127.0.0.1:9")
    through = r"^no connection to 127.0.0.1:1 through the proxy http://\*\*\*@127.0.0.1:9 \(grpc_proxy\): refused$"
    with Admin("127.0.0.1:1") as admin, pytest.raises(ServerUnavailable, match=through):
        admin.status()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:p@ss@host:4318/v1?key=k", "http://***@host:4318/v1?***"),
        ("https://token@host", "https://***@host"),
        ("can't reach s3://id:key@bucket/a and http://u:p@b/", "can't reach s3://***@bucket/a and http://***@b/"),
        ("host:4318/v1@2", "host:4318/v1@2"),
    ],
)
def test_nobody_reads_the_password_of_an_address(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_a_worker_says_that_it_waits_for_a_server(patience: Patience, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ServerUnavailable):
        run_hyperparameters("127.0.0.1:1", patience.retry())
    assert "no server at 127.0.0.1:1 (is gem-server running?); trying again" in caplog.messages[0]
