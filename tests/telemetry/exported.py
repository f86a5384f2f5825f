"""The metrics that servers and workers export, and those that a PromQL expression names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from gem_server.durability.journal import Journal
from gem_server.durability.metrics import LogMetrics
from gem_worker.process.metrics import WorkerMetrics
from prometheus_client import CollectorRegistry, Metric
from telemetry.test_metrics import after_everything

TARGET = {"instance", "job", "run"}  # labels that Prometheus's configuration gives to everything that it scrapes
# What Prometheus makes itself, and what every process exports (tests/telemetry/test_metrics_http.py): names and labels.
FROM_ELSEWHERE: dict[str, dict[str, set[str]]] = {
    "up": {},
    "process_resident_memory_bytes": {},
    "process_start_time_seconds": {},
    "ALERTS": {"alertname": set(), "alertstate": {"pending", "firing"}},
}


def worker_registry() -> CollectorRegistry:
    """A worker's metrics after a step."""
    registry = CollectorRegistry()
    worker = WorkerMetrics(registry)
    worker.trained(0.5, 0.1)
    for phase in ("data", "compute", "exchange"):
        with worker.phase(phase):
            pass
    return registry


def log_registry() -> CollectorRegistry:
    """The metrics of a server's log."""
    registry = CollectorRegistry()
    LogMetrics(registry, Journal("run")).flushed(0.001)
    return registry


@cache
def exported() -> dict[str, dict[str, set[str]]]:
    """Everything that a server or a worker can export: by the sample's name, its labels and their values."""
    watch = after_everything()
    watch.progress.rejected["SequenceGap"] += 1
    found = {name: dict(labels) for name, labels in FROM_ELSEWHERE.items()}
    ours = (*watch.registry.collect(), *log_registry().collect())
    for family in (*ours, *worker_registry().collect()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    for name in ("process_resident_memory_bytes", "process_start_time_seconds", *names_of(ours)):
        found[name]["range"] = {"", "0", "1", "2"}  # of a server of three; tests/telemetry/test_registry.py
    return found


def names_of(families: Iterable[Metric]) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def metrics_of(expression: str) -> set[str]:
    """The metrics that a PromQL expression names."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\b\s*(\([^)]*\))?", "", bare)
    return set(re.findall(r"(?<![\w:])[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - {"and", "or", "unless", "bool", "offset", "Inf"}


def grouped_by(expression: str) -> set[str]:
    """The labels that an expression groups or matches by."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {label for labels in lists for label in re.split(r"\s*,\s*", labels.strip()) if label}
