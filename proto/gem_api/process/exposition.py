"""Serves a process's metrics to Prometheus."""

from __future__ import annotations

from wsgiref.types import WSGIApplication

from prometheus_client import ProcessCollector, make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from gem_api.process.http_port import HttpPort


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
    host, _, port = address.rpartition(":")
    try:
        http = HttpPort(host.strip("[]") or "0.0.0.0", int(port), app or make_wsgi_app(registry))
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"can't serve metrics on {address!r}: {error}; give --metrics-listen HOST:PORT, or '' to serve none"
        ) from None
    ProcessCollector(registry=registry)
    http.start()
    return f"{host}:{http.server_port}"
