"""The server's registry of metrics, which says of each sample whose range it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy

from gem_api.ranges import Range
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

LABEL = "range"


class ServerRegistry(CollectorRegistry):
    """A registry. If the server is one of several, every sample of every collector gets the label `range`, the range's number.

    A query that sums over servers so counts a run once with `range=~"0|"`: range 0 leads, and a server that holds everything
    has no such label.

    Args:
        part: Which part of θ the server holds.
    """

    def __init__(self, part: Range) -> None:
        super().__init__()
        self._part = part

    def register(self, collector: Collector) -> None:
        super().register(collector if self._part.whole else _Labelled(collector, str(self._part.index)))


class _Labelled(Collector):
    """Collects what another collector does, with one more label."""

    def __init__(self, collector: Collector, value: str) -> None:
        self._collector, self._value = collector, value

    def describe(self) -> Iterable[Metric]:
        """Returns the other's names; they are not collected for it, as a scrape is not free."""
        describe = getattr(self._collector, "describe", None)
        return describe() if describe else []

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.collect():
            labelled = copy(family)  # a collector may keep its family
            labelled.samples = [one._replace(labels={**one.labels, LABEL: self._value}) for one in family.samples]
            yield labelled
