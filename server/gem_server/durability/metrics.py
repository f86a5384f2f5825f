"""The write-ahead log as Prometheus metrics. Registered only with `--durability log`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.durability.journal import Journal

_SECONDS = tuple(base * 10.0**exponent for exponent in range(-4, 1) for base in (1, 2, 5))


class LogMetrics(Collector):
    """The size and speed of the write-ahead log, and whether it can be written; read at each scrape."""

    def __init__(self, registry: CollectorRegistry, journal: Journal) -> None:
        self._journal = journal
        self._flush = Histogram(
            "gem_log_flush_seconds",
            "Time to write a group of records to the disk.",
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def flushed(self, seconds: float) -> None:
        """Adds the time that a group of records took."""
        self._flush.observe(seconds)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        journal = self._journal
        durable, appended = journal.durable, journal.appended  # in this order: both grow meanwhile, the difference must be ≥ 0
        yield CounterMetricFamily("gem_log_records", "Records of the log on the disk, since the run began.", durable)
        yield GaugeMetricFamily("gem_log_waiting_records", "Records that wait to be written to the disk.", appended - durable)
        yield GaugeMetricFamily("gem_log_bytes", "Approximate bytes of the log since the last checkpoint.", journal.size)
        yield GaugeMetricFamily(
            "gem_log_stalled",
            "1 while the log can't be written, so that no commit is acknowledged; else 0.",
            int(journal.stall is not None),
        )
