"""The label `range`: every sample of a server of several has it, and none of a server that holds everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import WHOLE, Range
from gem_server.durability.journal import Journal
from gem_server.durability.metrics import LogMetrics
from gem_server.telemetry.metrics import Metrics, ServerRegistry
from gem_server.telemetry.progress import Progress, Traffic
from kit.core import make_core
from prometheus_client import Metric, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


def server_of(part: Range) -> ServerRegistry:
    """Everything that a server registers."""
    registry = ServerRegistry(part)
    core = make_core(Hyperparameters())
    core.part = part
    Metrics(registry, core, Progress(started=0.0), Traffic(), lambda: 0, lambda at: at)
    LogMetrics(registry, Journal("run")).flushed(0.001)
    ProcessCollector(registry=registry)
    return registry


def labels_of(registry: ServerRegistry) -> set[str | None]:
    return {sample.labels.get("range") for family in registry.collect() for sample in family.samples}


@pytest.mark.parametrize(("part", "label"), [(WHOLE, None), (Range(0, 1), None), (Range(0, 3), "0"), (Range(2, 3), "2")])
def test_every_sample_names_the_range_of_a_server_of_several(part: Range, label: str | None) -> None:
    assert labels_of(server_of(part)) == {label}


def test_the_label_is_all_that_a_range_adds() -> None:
    names = [
        {
            (sample.name, *sorted(sample.labels.keys() - {"range"}))
            for family in server_of(part).collect()
            for sample in family.samples
        }
        for part in (WHOLE, Range(1, 2))
    ]
    assert names[0] == names[1]


def test_a_scrape_that_names_its_metrics_gets_the_label_too() -> None:
    registry = ServerRegistry(Range(1, 2))
    Metrics(registry, make_core(Hyperparameters()), Progress(started=0.0), Traffic(), lambda: 0, lambda at: at)
    LogMetrics(registry, Journal("run"))
    text = generate_latest(registry.restricted_registry(["gem_log_flush_seconds_count"])).decode()
    assert 'gem_log_flush_seconds_count{range="1"} 0.0' in text


def test_a_collector_that_keeps_its_family_is_not_changed() -> None:
    class Keeps(Collector):
        family = GaugeMetricFamily("kept", "Kept.", value=1)

        def collect(self) -> Iterator[Metric]:
            yield self.family

    registry = ServerRegistry(Range(1, 2))
    registry.register(Keeps())
    assert [next(iter(registry.collect())).samples[0].labels for _ in range(2)] == [{"range": "1"}] * 2
    assert Keeps.family.samples[0].labels == {}


@pytest.mark.parametrize("count", [1, 3])
def test_a_server_says_how_many_servers_hold_the_model(count: int) -> None:
    labels = {"range": "0"} if count > 1 else {}
    assert server_of(Range(0, count)).get_sample_value("gem_ranges", labels) == count
