"""Serves a process's metrics to Prometheus."""

from __future__ import annotations

from prometheus_client import ProcessCollector, start_http_server
from prometheus_client.registry import CollectorRegistry


def serve_metrics(address: str, registry: CollectorRegistry) -> None:
    """Serves `registry`, and the usual `process_` metrics, on "host:port" in a thread; an empty address means not at all.

    Raises:
        ValueError: The address makes no sense, is in use, or is not this machine's.
    """
    if not address:
        return
    host, _, port = address.rpartition(":")
    try:
        start_http_server(int(port), addr=host.strip("[]") or "0.0.0.0", registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"can't serve metrics on {address!r}: {error}; give --metrics-listen HOST:PORT, or '' for none"
        ) from None
    ProcessCollector(registry=registry)
