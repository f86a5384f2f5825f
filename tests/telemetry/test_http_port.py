"""The HTTP port: slow, idle and hostile clients cost a few threads for a few seconds, and keep nobody out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import pytest
from gem_api.process.http_port import MAX_CONNECTIONS, MAX_SECONDS, HttpPort, serve_metrics
from kit.server import DEADLINE, wait_until
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


class Served:
    """A running port on a clock that the test moves, and its clients."""

    def __init__(self) -> None:
        self.now = 0.0
        self.port = HttpPort("127.0.0.1", 0, app, lambda: self.now)
        self.port.start()
        self.clients: list[socket.socket] = []

    def connect(self, sent: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port.server_port), DEADLINE)
        self.clients.append(client)
        client.sendall(sent)
        return client

    def ask(self, request: bytes) -> bytes:
        return answer(self.connect(request))

    def leave(self) -> None:
        """Closes all clients."""
        while self.clients:
            self.clients.pop().close()

    def close(self) -> None:
        self.leave()
        self.port.shutdown()
        self.port.server_close()


def answer(client: socket.socket) -> bytes:
    """Everything until the server closes the connection; empty if it was reset."""
    parts = []
    with suppress(ConnectionError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    yield running
    running.leave()
    running.port.set_app(app)
    wait_until(lambda: threads() == 0, "all requests to end")


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


GET = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_request_is_answered_and_the_connection_closed(served: Served) -> None:
    assert served.ask(GET).endswith(b"\r\n\r\n/hello")


def test_idle_connections_keep_nobody_out_and_take_few_threads(served: Served) -> None:
    for _ in range(10 * MAX_CONNECTIONS):
        served.connect(b"GET / HT")  # a request that never ends
    assert served.ask(GET).endswith(b"/hello")
    wait_until(lambda: threads() <= MAX_CONNECTIONS, f"at most {MAX_CONNECTIONS} threads")


def test_a_connection_that_lasts_too_long_is_ended(served: Served) -> None:
    slow = served.connect(b"GET / HT")
    wait_until(lambda: threads() == 1, "the connection to be served")
    served.now += MAX_SECONDS + 1
    assert answer(slow) == b""
    wait_until(lambda: threads() == 0, "its thread to end")


def test_a_client_that_does_not_read_its_response_is_ended_too(served: Served) -> None:
    served.port.set_app(lambda environ, start: (start("200 OK", []), iter([b"x" * (1 << 26)]))[1])
    lazy = served.connect(GET)
    assert lazy.recv(1) == b"H"
    served.now += MAX_SECONDS + 1
    wait_until(lambda: threads() == 0, "its thread to end")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
    ],
    ids=["line", "many headers", "long header", "version", "TLS"],
)
def test_a_malformed_or_endless_request_is_refused(request_: bytes, status: bytes, served: Served) -> None:
    assert status in served.ask(request_).split(b"\r\n")[0] + b"400" * (status == b"400")
    assert served.ask(GET).endswith(b"/hello")


def test_clients_that_send_nonsense_and_leave_harm_nothing(served: Served) -> None:
    for sent in (b"", b"\r\n\r\n", b"GET", bytes(range(256)) * 40):
        served.connect(sent).close()
    assert served.ask(GET).endswith(b"/hello")
    wait_until(lambda: threads() == 0, "their threads to end")


def test_a_worker_still_serves_its_metrics_on_any_path() -> None:
    address = serve_metrics("127.0.0.1:0", CollectorRegistry())
    host, _, port = address.rpartition(":")
    for path in (b"/metrics", b"/"):
        with socket.create_connection((host, int(port)), DEADLINE) as client:
            client.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
            assert b"process_cpu_seconds_total" in answer(client)


@pytest.mark.parametrize("host", ["[::]", "0.0.0.0", ""])
@pytest.mark.parametrize("reached", [("127.0.0.1", "::1"), ("127.0.0.1",)], ids=["both families", "a machine without IPv6"])
def test_every_address_means_those_that_the_machine_has(
    host: str, reached: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: "::1" in reached)
    port = int(serve_metrics(f"{host}:0", CollectorRegistry()).rpartition(":")[2])
    for at in ("127.0.0.1", "::1"):
        with suppress(ConnectionRefusedError) if at not in reached else nullcontext():
            socket.create_connection((at, port), DEADLINE).close()
            assert at in reached


def test_an_address_that_is_taken_gets_one_line_that_says_what_to_do(served: Served) -> None:
    with pytest.raises(ValueError, match=r"can't serve metrics on .*: .*in use; give --metrics-listen HOST:PORT"):
        serve_metrics(f"127.0.0.1:{served.port.server_port}", CollectorRegistry())


def test_an_error_of_the_port_itself_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail(port: HttpPort) -> None:
        if not failed.is_set():
            failed.set()
            raise MemoryError

    monkeypatch.setattr(HttpPort, "service_actions", fail)
    served = Served()
    assert failed.wait(DEADLINE)
    assert served.ask(b"GET /there HTTP/1.0\r\n\r\n").endswith(b"/there")
    served.close()
