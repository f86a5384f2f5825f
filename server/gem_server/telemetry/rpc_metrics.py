"""Durations and failures of calls, by method, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from gem_api.errors import GemError
from gem_api.methods import ADMIN, TRAINING
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.telemetry.metrics import LabelledHistogram
from gem_server.telemetry.wire_metrics import SECONDS

COMMIT = "Commit"  # a call, or a lane, carries many of them: each is measured on its own
CANCELLED = "cancelled"  # the client has gone, or gave up waiting
INTERNAL = "internal"  # a fault of the server
_METHODS = tuple(method.name for service in (TRAINING, ADMIN) for method in service.methods)


class RpcMetrics(Collector):
    """The time that each call takes and the errors that calls end with. Of commits, each one counts, however it travels.

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
            SECONDS,
            "method",
            _METHODS,
        )
        self._errors: Counter[tuple[str, str]] = Counter()
        registry.register(self)

    def ended(self, method: str, began: float, error: str = "") -> None:
        """Adds a call that ends now, with an error's name if it failed."""
        self.add(method, self.clock() - began, error)

    def add(self, method: str, seconds: float, error: str = "") -> None:
        """Adds a call that took so long, with an error's name if it failed."""
        self._seconds.add(method, seconds)
        if error:
            self.failed(method, error)

    def failed(self, method: str, error: str) -> None:
        """Counts an error without a time."""
        self._errors[method, error] += 1

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._seconds.collect()
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
