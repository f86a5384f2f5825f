"""Metrics of a worker process: the time of each phase of a step, and the loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

_SECONDS = tuple(base * 10.0**exponent for exponent in range(-4, 2) for base in (1, 2, 5))


class WorkerMetrics:
    """`gem_worker_step_seconds{phase}` and `gem_worker_loss`, in the given registry.

    Phases: "data" (waiting for a batch), "compute" (forward and backward, with simulated time), "exchange" (commit and new θ).
    All workers of a process share one instance, from several threads: times add up, the loss is the latest of any worker.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "gem_worker_step_seconds", "Time of a step, by phase.", ["phase"], buckets=_SECONDS, registry=registry
        )
        self._loss = Gauge("gem_worker_loss", "Training loss on the last batch.", registry=None)
        self._registry, self._shows_loss, self._lock = registry, False, threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times one phase of a step."""
        with self._seconds.labels(name).time():
            yield

    def timing(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items; the wait for each one is timed as a phase."""
        iterator, end = iter(items), object()
        while True:
            began = time.perf_counter()
            item = next(iterator, end)
            if item is end:
                return
            self._seconds.labels(name).observe(time.perf_counter() - began)
            yield item

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase so far."""
        samples = [sample for metric in self._seconds.collect() for sample in metric.samples]
        return {sample.labels["phase"]: sample.value for sample in samples if sample.name.endswith("_sum")}

    def loss(self, value: float) -> None:
        """The loss of a batch. Before the first there is no such metric: a 0 would look like the lowest loss of all workers."""
        self._loss.set(value)
        with self._lock:
            if not self._shows_loss:
                self._registry.register(self._loss)
                self._shows_loss = True
