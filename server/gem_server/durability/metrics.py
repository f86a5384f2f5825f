"""The log as Prometheus metrics, where one is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.durability.journal import Journal

_SECONDS = tuple(base * 10.0**exponent for exponent in range(-4, 1) for base in (1, 2, 5))


class LogMetrics(Collector):
    """What is written to the log, and whether it can be.

    Args:
        registry: Where to register.
        journal: Read at each scrape.
    """

    def __init__(self, registry: CollectorRegistry, journal: Journal) -> None:
        self._journal = journal
        self._flush = Histogram(
            "gem_log_flush_seconds",
            "Time that a group of records takes to reach the disk.",
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def flushed(self, seconds: float) -> None:
        """Takes note of a group."""
        self._flush.observe(seconds)

    def describe(self) -> Iterable[Metric]:
        """Registers without being scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        journal = self._journal
        durable, appended = journal.durable, journal.appended  # in this order: it is read while both grow
        yield CounterMetricFamily("gem_log_records", "Records written to the log since the run began.", durable)
        yield GaugeMetricFamily("gem_log_waiting_records", "Records that are not on the disk yet.", appended - durable)
        yield GaugeMetricFamily("gem_log_bytes", "Bytes in the log since the last checkpoint, about.", journal.size)
        yield GaugeMetricFamily(
            "gem_log_stalled",
            "1 while nothing is acknowledged because the log can't be written; else 0.",
            int(bool(journal.trouble)),
        )
