"""Serves a process's metrics to Prometheus."""

from __future__ import annotations

from prometheus_client import ProcessCollector, start_http_server
from prometheus_client.registry import CollectorRegistry


def serve_metrics(address: str, registry: CollectorRegistry) -> None:
    """Serves `registry` and the standard `process_` metrics on "host:port", in a thread. Does nothing if the address is empty.

    Raises:
        ValueError: The address is malformed, in use, or does not belong to this machine.
    """
    if not address:
        return
    host, _, port = address.rpartition(":")
    try:
        start_http_server(int(port), addr=host.strip("[]") or "0.0.0.0", registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"can't serve metrics on {address!r}: {error}; give --metrics-listen HOST:PORT, or '' to serve none"
        ) from None
    ProcessCollector(registry=registry)
