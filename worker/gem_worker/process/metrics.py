"""Metrics of a worker process: the time of each phase of a step, and the training loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gem_api.process.tracing import span
from prometheus_client import Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

_SECONDS = tuple(base * 10.0**exponent for exponent in range(-4, 2) for base in (1, 2, 5))


class WorkerMetrics:
    """`gem_worker_step_seconds{phase}`, `gem_worker_loss` and `gem_worker_learning_rate`, in the given registry.

    Phases: "data" (waiting for a batch), "compute" (forward and backward pass, and simulated compute time; a worker alone on a
    GPU reads the next batch meanwhile, which counts as data too), "exchange" (sending a commit and receiving θ). All workers of
    a process share one instance, from several threads: their times add up, and the loss and the learning rate are those of the
    worker that finished a batch last.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "gem_worker_step_seconds", "Time of each phase of a training step.", ["phase"], buckets=_SECONDS, registry=registry
        )
        self._loss = Gauge("gem_worker_loss", "Training loss of the process's last batch.", registry=None)
        self._rate = Gauge("gem_worker_learning_rate", "Largest learning rate of the process's last step.", registry=None)
        self._registry, self._shown, self._lock = registry, False, threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times one phase of a step, which is a span of the step's trace too."""
        with self._seconds.labels(name).time(), span(name):
            yield

    def timing(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and times the wait for each as a phase."""
        iterator, end = iter(items), object()
        while True:
            began = time.perf_counter()
            with span(name):
                item = next(iterator, end)
            if item is end:
                return
            self._seconds.labels(name).observe(time.perf_counter() - began)
            yield item

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase so far."""
        samples = [sample for metric in self._seconds.collect() for sample in metric.samples]
        return {sample.labels["phase"]: sample.value for sample in samples if sample.name.endswith("_sum")}

    def trained(self, loss: float, learning_rate: float) -> None:
        """Sets the loss of the last batch, and the learning rate of the last step. Both metrics appear with the first batch: a
        loss of 0 would look like the lowest of all."""
        self._loss.set(loss)
        self._rate.set(learning_rate)
        with self._lock:
            if not self._shown:
                self._registry.register(self._loss)
                self._registry.register(self._rate)
                self._shown = True
