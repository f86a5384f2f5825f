"""An HTTP port for metrics and a few small pages. Slow and hostile clients take at most a few threads, for a few seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from prometheus_client import ProcessCollector, make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from gem_api.process.addresses import host_and_port, where_to_listen, with_port

MAX_CONNECTIONS = 32  # beyond that, a new connection ends the oldest one
_PAUSE_SECONDS = 0.1  # after an error that may come again at once
MAX_SECONDS = 10.0  # that a connection may last, from its start to the end of the response


class HttpPort(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application: one request a connection, each in a thread of its own.

    Args:
        host: A host name or an IPv4 or IPv6 address; "", "0.0.0.0" and "::" all mean every address of both.
        port: 0 for a free one; `server_port` has the result.
        app: The application.
        clock: Returns monotonic seconds.

    Raises:
        OSError, OverflowError: The address can't be used.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: WSGIApplication, clock: Callable[[], float] = time.monotonic) -> None:
        self.address_family, address = where_to_listen(host, port)
        self._clock = clock
        self._lock = threading.Lock()
        self._began: dict[socket.socket, float] = {}  # the open connections, oldest first
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)  # not that of the HTTP server, which asks the resolver for this machine's name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def start(self) -> None:
        """Serves in the background, until the process ends."""
        threading.Thread(target=self._serve, name="http", daemon=True).start()

    def _serve(self) -> None:
        """Goes on after an error, such as a lack of memory: the probes must not fail because of it."""
        while True:
            try:
                return self.serve_forever()
            except Exception:
                time.sleep(_PAUSE_SECONDS)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._began) >= MAX_CONNECTIONS:
                self._end(next(iter(self._began)))
            self._began[request] = self._clock()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections that last too long. `serve_forever` calls this at least twice a second."""
        latest = self._clock() - MAX_SECONDS
        with self._lock:
            for connection in [connection for connection, began in self._began.items() if began < latest]:
                self._end(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._began.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients that go away are no news, and could fill the log."""

    def _end(self, connection: socket.socket) -> None:
        """Wakes the thread that serves a connection; that thread closes it. The caller holds the lock."""
        del self._began[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Logs no requests."""


def serve_metrics(address: str, registry: CollectorRegistry, app: WSGIApplication | None = None) -> str:
    """Serves `registry` and the standard `process_` metrics on "host:port", in a thread. Does nothing if the address is empty.

    Args:
        address: Port 0 picks a free one.
        registry: The metrics.
        app: Answers the requests instead, for a process that serves more than metrics.

    Returns:
        The address, with the port that was picked; empty if nothing is served.

    Raises:
        ValueError: The address is malformed, in use, or does not belong to this machine.
    """
    if not address:
        return ""
    try:
        http = HttpPort(*host_and_port(address), app or make_wsgi_app(registry))
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"can't serve metrics on {address!r}: {error}; give --metrics-listen HOST:PORT, or '' to serve none"
        ) from None
    ProcessCollector(registry=registry)
    http.start()
    return with_port(address, http.server_port)
