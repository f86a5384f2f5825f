"""Durations of commits on the network, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.commit_times import CommitTimes
from gem_server.telemetry.metrics import LabelledHistogram

SECONDS = (*(base * 10.0**exponent for exponent in range(-4, 2) for base in (1, 2, 5)), 100.0)


class Way(StrEnum):
    """A direction of tensors: gradients up to the server, θ down to a worker."""

    UP = "up"
    DOWN = "down"


class WireMetrics(Collector):
    """The time that each commit's tensors take on the network, and wait for their turn on it. What goes through shared memory
    is not counted.

    One thread at a time adds values; another may collect meanwhile.

    Args:
        registry: Where to register.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._carrying = LabelledHistogram(
            "gem_commit_wire_seconds",
            "Time on the network of a commit. up: from a gradient's first byte, once it is its turn, to its last; down: until "
            "the system has taken all of θ.",
            SECONDS,
            "direction",
            Way,
        )
        self._waiting = LabelledHistogram(
            "gem_commit_turn_wait_seconds",
            "Time that a commit's tensors wait for their turn on the network; 0 if they need none.",
            SECONDS,
            "direction",
            Way,
        )
        registry.register(self)

    def add(self, times: CommitTimes, transport: str) -> None:
        """Adds a commit that has ended; of one that failed, what it got to."""
        if transport == "memory":
            return
        if times.upload_began:
            self._waiting.add(Way.UP, times.upload_began - times.upload_asked)
        if times.received:
            self._carrying.add(Way.UP, times.received - times.upload_began)
        if times.send_began:
            self._waiting.add(Way.DOWN, times.send_began - times.ready)
        if times.sent:
            self._carrying.add(Way.DOWN, times.sent - times.send_began)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._carrying.collect()
        yield self._waiting.collect()
