"""How long commits are on the network, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.telemetry.metrics import LabelledHistogram

SECONDS = (*(base * 10.0**exponent for exponent in range(-4, 2) for base in (1, 2, 5)), 100.0)


class Way(StrEnum):
    """Where tensors go: gradients up to the server, θ down to a worker."""

    UP = "up"
    DOWN = "down"


class WireMetrics(Collector):
    """The time that each commit's tensors take on the network, and wait for their turn on it. What goes through shared memory
    is not counted.

    One thread at a time adds values; another may collect meanwhile.

    Args:
        registry: Where to register.
        clock: Returns monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
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

    def carried(self, way: Way, transport: str, began: float) -> float:
        """Adds a tensor that is complete now. Returns the present time."""
        now = self._clock()
        if transport != "memory":
            self._carrying.add(way, now - began)
        return now

    def waited(self, way: Way, transport: str, began: float) -> float:
        """Adds the wait of a tensor whose turn begins now. Returns the present time."""
        now = self._clock()
        if transport != "memory":
            self._waiting.add(way, now - began)
        return now

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._carrying.collect()
        yield self._waiting.collect()
