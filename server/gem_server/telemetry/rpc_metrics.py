"""Durations and failures of calls, by method, and of commits on the network, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gem_api.errors import GemError
from gem_api.methods import ADMIN, TRAINING
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.commit_times import CommitTimes
from gem_server.telemetry.metrics import LabelledHistogram

COMMIT = "Commit"  # a call, or a lane, carries many of them: each is measured on its own
CANCELLED = "cancelled"  # the client has gone, or gave up waiting
INTERNAL = "internal"  # a fault of the server
_UP, _DOWN = "up", "down"  # directions of tensors: gradients to the server, θ to a worker
_SECONDS = (*(base * 10.0**exponent for exponent in range(-4, 2) for base in (1, 2, 5)), 100.0)
_METHODS = tuple(method.name for service in (TRAINING, ADMIN) for method in service.methods)


class RpcMetrics(Collector):
    """The time that each call takes and the errors that calls end with. Of commits, each one counts, however it travels; also
    the time that its tensors take on the network, and wait for their turn on it, unless they go through shared memory.

    One thread at a time adds values; another may collect meanwhile.

    Args:
        registry: Where to register.
        clock: Returns monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._seconds = LabelledHistogram(
            "gem_rpc_seconds",
            "Time from a request until its reply is made, by method. Of a commit, also on a lane: from header to θ sent.",
            _SECONDS,
            "method",
            _METHODS,
        )
        self._carrying = LabelledHistogram(
            "gem_commit_wire_seconds",
            "Time on the network of a commit. up: from a gradient's first byte, once it is its turn, to its last; down: until "
            "the system has taken all of θ.",
            _SECONDS,
            "direction",
            (_UP, _DOWN),
        )
        self._waiting = LabelledHistogram(
            "gem_commit_turn_wait_seconds",
            "Time that a commit's tensors wait for their turn on the network; 0 if they need none.",
            _SECONDS,
            "direction",
            (_UP, _DOWN),
        )
        self._errors: Counter[tuple[str, str]] = Counter()
        registry.register(self)

    def ended(self, method: str, began: float, error: str = "") -> None:
        """Adds a call that ends now, with an error's name if it failed."""
        self._seconds.add(method, self.clock() - began)
        if error:
            self.failed(method, error)

    def failed(self, method: str, error: str) -> None:
        """Counts an error without a time."""
        self._errors[method, error] += 1

    def commit_ended(self, times: CommitTimes, transport: str, error: str) -> None:
        """Adds a commit that has ended, with an error's name if it failed; then what it got to."""
        if error != INTERNAL:  # whoever answers the call counts it
            self._seconds.add(COMMIT, times.server_seconds)
            if error:
                self.failed(COMMIT, error)
        if transport == "memory":
            return
        if times.upload_began:
            self._waiting.add(_UP, times.upload_began - times.upload_asked)
        if times.received:
            self._carrying.add(_UP, times.received - times.upload_began)
        if times.send_began:
            self._waiting.add(_DOWN, times.send_began - times.ready)
        if times.sent:
            self._carrying.add(_DOWN, times.sent - times.send_began)

    def collect(self) -> Iterator[Metric]:
        for histogram in (self._seconds, self._carrying, self._waiting):
            yield histogram.collect()
        help_ = (
            f"Calls that failed, by method and error; {CANCELLED}: the client gave up or has gone; {INTERNAL}: a fault here."
        )
        errors = CounterMetricFamily("gem_rpc_errors", help_, labels=["method", "error"])
        for labels, count in self._errors.copy().items():
            errors.add_metric(labels, count)
        yield errors


def name_of(error: GemError | None) -> str:
    """The name by which an error is counted. None if the server has ended nothing: then the client has."""
    return CANCELLED if error is None else type(error).__name__
