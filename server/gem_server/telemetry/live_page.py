"""The live page of a run, the status that it shows, the metrics and the probes: what the server's HTTP port serves."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gem_api.process.message_json import as_dict
from gem_api.run_page import content_policy, live_page
from prometheus_client import make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from gem_server.telemetry.health import Health
from gem_server.telemetry.run_view import RunView

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

T = TypeVar("T")
MAX_WORKERS = 100  # in the status; a page with more rows is of no use
FRESH_SECONDS = 0.5  # that a status is served again, so that many readers cost no more than one
_PATIENCE = 5.0  # seconds; the event loop may be busy
_PATHS = "the live page is at /, its data at /status.json, Prometheus metrics at /metrics, probes at /healthz and /readyz\n"
Headers = list[tuple[str, str]]
Reply = tuple[str, Headers, bytes]  # status line, headers, body


class LivePage:
    """A WSGI application: the page at `/`; its data at `/status.json`, the status as JSON with the curves and the
    100 oldest workers; Prometheus metrics at `/metrics`; and for probes, which
    look at the status line alone, `/healthz` (does the server live?) and `/readyz` (can workers train with it now?).

    Args:
        registry: The metrics.
        health: Answers the probes.
        clock: Returns monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = make_wsgi_app(registry)
        self._health = health
        self._clock = clock
        page = live_page()
        self._page = page.encode()
        self._headers = [
            ("Content-Security-Policy", f"{content_policy(page)}; connect-src 'self'; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ]
        self._read: Callable[[], bytes] | None = None
        self._lock = threading.Lock()  # one reader at a time asks the event loop; the others wait for the same status
        self._status: Reply
        self._taken = -math.inf

    def show(self, view: RunView, loop: asyncio.AbstractEventLoop) -> None:
        """Serves the run's status and curves from now on. `loop` runs on the thread that changes the run."""
        self._read = lambda: _encode(as_dict(_call_on(loop, lambda: view.read(MAX_WORKERS, curves=True))))

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        line, headers, body = self._reply(environ)
        start_response(line, [*headers, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _reply(self, environ: WSGIEnvironment) -> Reply:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._text("405 Method Not Allowed", "use GET\n", [("Allow", "GET, HEAD")])
        if path == "/":
            return "200 OK", [("Content-Type", "text/html; charset=utf-8"), *self._headers], self._page
        if path == "/status.json":
            return self._status_reply()
        if path == "/healthz":
            return self._probe(self._health.why_dead(), "alive")
        if path == "/readyz":
            return self._probe(self._health.why_unready(), "ready")
        return self._metrics_reply(environ) if path == "/metrics" else self._text("404 Not Found", _PATHS)

    def _probe(self, problem: str, well: str) -> Reply:
        return self._text("503 Service Unavailable" if problem else "200 OK", f"{problem or well}\n")

    def _text(self, line: str, text: str, more: Headers | None = None) -> Reply:
        return line, [("Content-Type", "text/plain; charset=utf-8"), *(more or []), *self._headers], text.encode()

    def _metrics_reply(self, environ: WSGIEnvironment) -> Reply:
        started: list[Any] = []
        try:
            parts = self._metrics({**environ, "REQUEST_METHOD": "GET"}, lambda *line: started.extend(line))
        except (TypeError, ValueError):  # of prometheus_client, for a version in the Accept header that is no number
            return self._text("400 Bad Request", "the Accept header is malformed\n")
        return started[0], started[1], b"".join(parts)

    def _status_reply(self) -> Reply:
        with self._lock:
            if self._clock() - self._taken >= FRESH_SECONDS:
                self._status, self._taken = self._new_status(), self._clock()
            return self._status

    def _new_status(self) -> Reply:
        line, body = "503 Service Unavailable", _encode({"error": "the server is starting, busy or stopping"})
        if self._read is not None:
            with suppress(TimeoutError, RuntimeError):  # the event loop is busy, or has ended
                line, body = "200 OK", self._read()
        return line, [("Content-Type", "application/json"), *self._headers], body


def _call_on(loop: asyncio.AbstractEventLoop, read: Callable[[], T]) -> T:
    """Calls `read` on the loop's thread. Raises TimeoutError if it takes too long, RuntimeError if the loop has ended."""
    found: Future[T] = Future()

    def call() -> None:
        try:
            found.set_result(read())
        except BaseException as error:
            found.set_exception(error)

    loop.call_soon_threadsafe(call)
    return found.result(_PATIENCE)


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
