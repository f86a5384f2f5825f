"""The run as Prometheus metrics. The registry is passed in; nothing is created at import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from platform import python_version
from typing import Any

import numpy as np
from gem_api import __version__
from gem_api.hyperparameters import Hyperparameters
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.apply_loop import Timing
from gem_server.core.facts import Applied, EndReason
from gem_server.core.state_machine import Core
from gem_server.rules import PiFacts
from gem_server.telemetry.progress import Progress, Traffic

_STALENESS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_SECONDS = (*(base * 10.0**exponent for exponent in range(-5, 1) for base in (1, 2, 5)), 10.0)
_PI_OCTAVES = tuple(2.0**octave for octave in range(-10, 20))
_PACKAGES = ("grpcio", "numba", "numpy")  # whose versions gem_build_info tells, beside this package's and Python's
MAX_TENSORS = 500  # label values of gem_pi_tensor_median
MAX_WORKERS = 1000  # label values of gem_worker_*


class Metrics(Collector):
    """All of the server's metrics: what commits feed, and what is read off the core at each scrape.

    A scrape runs in a thread of its own while workers come and go. It must not iterate over a dict that may change: it
    iterates over a copy, made in one step of the interpreter (`dict.copy`, `dict(d)`, `tuple(d.values())`).

    Args:
        registry: Where to register.
        core: Read at each scrape.
        progress: Read at each scrape.
        traffic: Read at each scrape.
        queue_length: Commits waiting, asked at each scrape.
        wall: Turns monotonic seconds into Unix seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        core: Core,
        progress: Progress,
        traffic: Traffic,
        queue_length: Callable[[], int],
        wall: Callable[[float], float],
    ) -> None:
        self._core = core
        self._progress = progress
        self._traffic = traffic
        self._queue_length = queue_length
        self._wall = wall
        self._pi = PiHistogram()
        self._versions = {"version": __version__, "python": python_version(), **{name: version(name) for name in _PACKAGES}}
        self._staleness = Histogram(
            "gem_commit_staleness", "Commits applied between a worker's pull and its own commit (Eq. 2).",
            buckets=_STALENESS, registry=registry,
        )  # fmt: skip
        self._wait = Histogram(
            "gem_commit_wait_seconds", "Time that a complete commit waits for its turn.", buckets=_SECONDS, registry=registry
        )
        self._apply = Histogram(
            "gem_commit_apply_seconds", "Time that a commit's arithmetic takes.", buckets=_SECONDS, registry=registry
        )
        registry.register(self)

    def applied(self, applied: Applied, timing: Timing) -> None:
        """Takes note of a commit."""
        self._staleness.observe(applied.staleness)
        self._wait.observe(timing.waited)
        self._apply.observe(timing.applied)
        if applied.pi is not None:
            self._pi.add(applied.pi)

    def describe(self) -> Iterable[Metric]:
        """Registers without being scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._run()
        yield from self._commits()
        yield from self._leases()
        yield from self._resources()
        yield from self._data()
        yield from self._training()
        yield from self._per_worker()
        yield from self._checkpoint()

    def _run(self) -> Iterator[Metric]:
        core = self._core
        yield _gauge("gem_central_version", "Commits applied to the central variable.", core.central.version)
        yield InfoMetricFamily("gem_run", "The run and its settings.", {"run_id": core.run_id, **_texts(core.settings)})
        yield InfoMetricFamily("gem_build", "Versions of the software that the server runs on.", self._versions)
        if core.central.layout is not None:
            yield _gauge("gem_parameters", "Parameters of the model.", core.central.layout.size)
        yield _gauge(
            "gem_draining", "1 while the server finishes what is queued before it ends, else 0.", self._progress.draining
        )

    def _commits(self) -> Iterator[Metric]:
        progress = self._progress
        yield _counter("gem_commits", "Commits by outcome.", "outcome", self._core.outcomes)
        yield _counter("gem_commits_rejected", "Rejected commits, by error.", "error", dict(progress.rejected))
        yield _counter(
            "gem_nonfinite_losses", "Commits whose reported loss was no finite number.", None, progress.nonfinite_losses
        )
        yield _gauge("gem_commit_queue_length", "Commits that wait for their turn or have it.", self._queue_length())

    def _leases(self) -> Iterator[Metric]:
        leases = self._core.leases
        yield _gauge("gem_active_workers", "Workers that hold a lease.", len(leases.live))
        ended = {reason: leases.ended.get(reason, 0) for reason in EndReason}
        yield _counter("gem_leases_ended", "Leases that ended, by reason.", "reason", ended)
        yield _gauge("gem_quarantined_workers", "Workers that are kept out of the run.", len(self._core.quarantine.held))

    def _resources(self) -> Iterator[Metric]:
        memory = self._core.memory
        yield _counter("gem_received_bytes", "Bytes of tensor frames received.", None, self._traffic.received)
        yield _counter("gem_sent_bytes", "Bytes of tensor frames sent.", None, self._traffic.sent)
        yield _gauge("gem_memory_bytes", "Bytes held for the central variable, its copies and the workers.", memory.held)
        yield _gauge("gem_memory_limit_bytes", "Bytes that may be held; 0 for no limit.", memory.limit)
        yield _gauge("gem_worker_memory_bytes", "Most bytes held for one worker.", memory.most_for_worker)

    def _data(self) -> Iterator[Metric]:
        ledger = self._core.ledger
        yield _gauge("gem_epoch", "Newest epoch that a shard was handed out of, from 0.", ledger.epoch)
        shards = GaugeMetricFamily(
            "gem_shards", "Shards: of the newest epoch pending, of all epochs the rest.", labels=["state"]
        )
        for state, count in {"pending": ledger.pending, "leased": len(ledger.held), "completed": ledger.completed}.items():
            shards.add_metric([state], count)
        yield shards
        yield _counter("gem_samples_committed", "Samples in applied commits.", None, self._core.samples_committed)

    def _checkpoint(self) -> Iterator[Metric]:
        progress = self._progress
        if progress.checkpoint_version is not None:
            yield _gauge("gem_checkpoint_version", "Version of the last checkpoint.", progress.checkpoint_version)
            written = self._wall(progress.checkpoint_at)
            yield _gauge("gem_checkpoint_timestamp_seconds", "When the last checkpoint was written, Unix time.", written)

    def _per_worker(self) -> Iterator[Metric]:
        """What each live worker did under its present lease; its series end with the lease."""
        commits = CounterMetricFamily("gem_worker_commits", "Commits applied.", labels=["worker"])
        staleness = CounterMetricFamily("gem_worker_staleness", "Sum of the commits' staleness.", labels=["worker"])
        influence = CounterMetricFamily(
            "gem_worker_influence", "Sum of the commits' mean scaling factors: commits at full strength.", labels=["worker"]
        )
        rejected = CounterMetricFamily("gem_worker_rejected", "Commits refused.", labels=["worker"])
        for name, worker in islice(self._progress.workers.copy().items(), MAX_WORKERS):
            commits.add_metric([name], worker.commits)
            staleness.add_metric([name], worker.staleness)
            influence.add_metric([name], worker.influence)
            rejected.add_metric([name], worker.rejected)
        yield from (commits, staleness, influence, rejected)

    def _training(self) -> Iterator[Metric]:
        progress = self._progress
        if progress.loss.value is not None:
            yield _gauge("gem_training_loss", "Training loss, smoothed over about 50 commits.", progress.loss.value)
        evaluation = progress.evaluation
        if evaluation is not None:
            yield _gauge("gem_evaluation_loss", "Loss on held-out data.", evaluation.loss)
            if evaluation.accuracy is not None:
                yield _gauge("gem_evaluation_accuracy", "Accuracy on held-out data, 0 to 1.", evaluation.accuracy)
        pi = progress.last.pi if progress.last else None
        if pi is not None:
            yield from self._pi.collect()
            yield from self._last_pi(pi)

    def _last_pi(self, pi: PiFacts) -> Iterator[Metric]:
        yield _gauge("gem_pi_median", "Median of the scaling factor over all parameters, last commit.", pi.median)
        medians = GaugeMetricFamily(
            "gem_pi_tensor_median", "Median of the scaling factor per tensor, last commit.", labels=["tensor"]
        )
        layout = self._core.central.layout
        for tensor, median in zip(layout.tensors[:MAX_TENSORS] if layout else (), pi.tensor_medians, strict=False):
            medians.add_metric([tensor.name], float(median))
        yield medians
        clamped = GaugeMetricFamily("gem_pi_clamped_ratio", "Share of parameters at a bound, last commit.", labels=["bound"])
        clamped.add_metric(["zero"], pi.zero_ratio)
        clamped.add_metric(["max"], pi.max_ratio)
        yield clamped
        yield _gauge("gem_proxy_energy", "Kinetic energy of the proxy, last commit (Eq. 15).", pi.proxy_energy)
        yield _gauge("gem_central_energy", "Kinetic energy of the central variable, last commit (Eq. 16).", pi.central_energy)


class PiHistogram:
    """All of π over all parameters and commits, from the fused pass's own bins."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)
        self._edges = np.zeros(0, np.float32)
        self._middles = np.zeros(0, np.float64)

    def add(self, pi: PiFacts) -> None:
        if not self._counts.size:
            self._edges, self._middles = pi.edges, pi.middles
            self._counts = np.zeros_like(pi.counts)  # last: it tells a scrape that the others are there
        self._counts = self._counts + pi.counts

    def collect(self) -> Iterator[Metric]:
        counts, edges = self._counts, self._edges
        if not counts.size:
            return
        # A bin's lower edge bounds all bins before it, and powers of two from edges[2] on are edges of bins.
        bounds = [0.0, *(octave for octave in _PI_OCTAVES if edges[2] <= octave < edges[-1])]
        buckets = [(str(bound), float(counts[: max(1, np.searchsorted(edges, bound))].sum())) for bound in bounds]
        buckets += [(str(float(edges[-1])), float(counts.sum())), ("+Inf", float(counts.sum()))]
        total = float(counts @ self._middles)
        help_ = "Scaling factor over all parameters of all commits (Eq. 19); the sum is good to 1/32 of the parameters counted."
        yield HistogramMetricFamily("gem_pi", help_, buckets=buckets, sum_value=total)


def _texts(settings: Hyperparameters) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(settings).items()}


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_, value=value)


def _counter(name: str, help_: str, label: str | None, values: Any) -> Metric:
    """A counter; with a label, `values` maps its values to counts."""
    if label is None:
        return CounterMetricFamily(name, help_, value=values)
    family = CounterMetricFamily(name, help_, labels=[label])
    for key, count in values.items():
        family.add_metric([str(key)], count)
    return family
