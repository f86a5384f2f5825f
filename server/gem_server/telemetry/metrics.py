"""The run as Prometheus metrics. The registry is passed in; nothing is created at import."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, asdict, dataclass
from importlib.metadata import version
from itertools import accumulate, islice
from platform import python_version
from typing import Any

import numpy as np
from gem_api import __version__
from gem_api.ranges import Range
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gem_server.commit_times import CommitTimes
from gem_server.core.state_machine import Core
from gem_server.core.values import Applied, EndReason
from gem_server.rules import PiStatistics
from gem_server.telemetry.progress import Progress, Traffic, WorkerProgress

_STALENESS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_SECONDS = (*(base * 10.0**exponent for exponent in range(-5, 1) for base in (1, 2, 5)), 10.0)
_PI_OCTAVES = tuple(2.0**octave for octave in range(-10, 20))
_PACKAGES = ("grpcio", "numba", "numpy")  # gem_build_info has their versions, besides this package's and Python's
RANGE_LABEL = "range"
MAX_TENSORS = 500  # values of the label "tensor" of gem_pi_tensor_median
MAX_WORKERS = 1000  # values of the label "worker" of gem_worker_*


@dataclass(eq=False)
class Metrics(Collector):
    """The server's metrics. Each commit updates the histograms; each scrape reads all others from the objects below.

    A scrape runs in its own thread while workers join and leave. It must not iterate over a dict that may change. It
    iterates over a copy, made by one call that no other thread can interrupt (`dict.copy`, `dict(d)`, `tuple(d.values())`).

    Attributes:
        core, progress, traffic: Read at each scrape.
        queue_length: Returns the number of commits that wait; called at each scrape.
        wall: Converts monotonic seconds to Unix seconds.
        lane: Whether workers on other machines can commit on a lane.
        certificate_ends: Returns the Unix time at which each certificate in use ends, by setting; called at each scrape.
        waiting_for_memory: Returns how many gradients can't begin to arrive for lack of memory; called at each scrape.
    """

    registry: InitVar[CollectorRegistry]
    core: Core
    progress: Progress
    traffic: Traffic
    queue_length: Callable[[], int]
    wall: Callable[[float], float]
    lane: bool = False
    certificate_ends: Callable[[], dict[str, float]] = dict
    waiting_for_memory: Callable[[], int] = lambda: 0

    def __post_init__(self, registry: CollectorRegistry) -> None:
        self._pi = PiHistogram()
        self._versions = {"version": __version__, "python": python_version(), **{name: version(name) for name in _PACKAGES}}
        self._staleness = Histogram(
            "gem_commit_staleness", "Commits applied between a worker's pull and its own commit.", _STALENESS
        )
        self._wait = Histogram(
            "gem_commit_wait_seconds", "Time from a commit's last byte until the server begins to apply it.", _SECONDS
        )
        self._apply = Histogram("gem_commit_apply_seconds", "Time that the update rule takes for a commit.", _SECONDS)
        self._held = Histogram(
            "gem_reply_wait_seconds",
            "Time that a reply is held for the commits of other workers; empty if the run's setting reply_wait is 0.",
            _SECONDS,
        )
        self._lag = Histogram(
            "gem_event_loop_lag_seconds",
            "How late the event loop, which serves everything but the lanes, did what was due.",
            _SECONDS,
        )
        registry.register(self)

    def waited(self, worker: str, seconds: float) -> None:
        """Adds how long the reply to a commit was held."""
        self._held.add(seconds)

    def lagged(self, seconds: float) -> None:
        """Adds the time that the event loop was late."""
        self._lag.add(seconds)

    def applied(self, applied: Applied, times: CommitTimes) -> None:
        """Adds a commit to the histograms."""
        self._staleness.add(applied.staleness)
        self._wait.add(times.queue_seconds)
        self._apply.add(times.rule_seconds)
        if applied.pi is not None:
            self._pi.add(applied.pi)

    def collect(self) -> Iterator[Metric]:
        yield from self._run()
        yield from self._commits()
        yield from self._leases()
        yield from self._resources()
        yield from self._data()
        yield from self._training()
        yield from self._per_worker()
        yield from self._checkpoint()
        yield from self._certificates()

    def _run(self) -> Iterator[Metric]:
        core = self.core
        yield _gauge("gem_central_version", "Commits applied to the model's parameters θ.", core.central.version)
        run = {"run_id": core.run_id, **{name: str(value) for name, value in asdict(core.settings).items()}}
        yield InfoMetricFamily("gem_run", "The run's identifier and hyper-parameters.", run)
        yield InfoMetricFamily("gem_build", "Versions of gem-server, Python and the main libraries.", self._versions)
        if core.central.layout is not None:
            help_ = "Number of the model's parameters that this server holds."
            yield _gauge("gem_parameters", help_, core.central.layout.size)
        help_ = "Servers that hold the model together, one range each; 1: this one holds everything."
        yield _gauge("gem_ranges", help_, core.part.count)
        help_ = "1 once the workers have nothing left to train on, so that those that join leave again; else 0."
        yield _gauge("gem_run_complete", help_, core.complete)
        help_ = "1 while the server shuts down: it applies the queued commits, then ends; else 0."
        yield _gauge("gem_draining", help_, self.progress.draining)
        yield self._lag.collect()

    def _commits(self) -> Iterator[Metric]:
        progress = self.progress
        yield _counters("gem_commits", "Commits, by outcome.", "outcome", self.core.outcomes)
        help_ = "Commits whose gradient has arrived, by transport: memory, tcp and tls are lanes."
        yield _counters("gem_commits_received", help_, "transport", progress.received)
        yield _counters("gem_commits_rejected", "Rejected commits, by error.", "error", dict(progress.rejected))
        help_ = "Commits whose reported loss was NaN or infinite."
        yield _counter("gem_nonfinite_losses", help_, progress.nonfinite_losses)
        yield _gauge("gem_commit_queue_length", "Commits that wait or are being applied.", self.queue_length())
        yield from (histogram.collect() for histogram in (self._staleness, self._wait, self._apply, self._held))

    def _leases(self) -> Iterator[Metric]:
        leases = self.core.leases
        yield _gauge("gem_active_workers", "Workers that hold a lease.", len(leases.live))
        ended = {reason: leases.ended.get(reason, 0) for reason in EndReason}
        yield _counters("gem_leases_ended", "Leases that ended, by reason.", "reason", ended)
        quarantined = len(self.core.quarantine.held)
        yield _gauge("gem_quarantined_workers", "Workers in quarantine: they may not register.", quarantined)
        fallen_back = self.lane and sum(each.transport == "grpc" for each in self.progress.workers.copy().values())
        help_ = "Workers whose last commit came over gRPC, although the lane has a port; 0 without a port."
        yield _gauge("gem_fallen_back_workers", help_, fallen_back)

    def _resources(self) -> Iterator[Metric]:
        memory = self.core.memory
        yield _counter("gem_received_bytes", "Bytes of gradients and deltas received.", self.traffic.received)
        yield _counter("gem_sent_bytes", "Bytes of θ sent.", self.traffic.sent)
        yield _gauge("gem_memory_bytes", "Bytes held for θ, copies of it and the workers' buffers.", memory.held)
        yield _gauge("gem_memory_limit_bytes", "Maximum bytes that may be held (memory_limit); 0: no limit.", memory.limit)
        yield _gauge("gem_worker_memory_bytes", "Maximum bytes held for one worker.", memory.most_for_worker)
        help_ = "Gradients that can't begin to arrive because all memory for them is in use."
        yield _gauge("gem_uploads_waiting_for_memory", help_, self.waiting_for_memory())

    def _data(self) -> Iterator[Metric]:
        ledger = self.core.ledger
        yield _gauge("gem_epoch", "Newest epoch of which a worker got a shard, counted from 0.", ledger.epoch)
        help_ = "Shards, by state: pending ones of the newest epoch, leased and completed ones of all epochs."
        shards = {"pending": ledger.pending, "leased": len(ledger.held), "completed": ledger.completed}
        yield _gauges("gem_shards", help_, "state", shards)
        yield _counter("gem_samples_committed", "Samples in applied commits.", self.core.samples_committed)

    def _checkpoint(self) -> Iterator[Metric]:
        progress = self.progress
        help_ = "Checkpoints that could not be written, since the server started."
        yield _counter("gem_checkpoint_failures", help_, progress.checkpoint_failures)
        if progress.checkpoint_version is not None:
            yield _gauge("gem_checkpoint_version", "Version of θ in the last checkpoint.", progress.checkpoint_version)
            written = self.wall(progress.checkpoint_at)
            yield _gauge("gem_checkpoint_timestamp_seconds", "Unix time at which the last checkpoint was written.", written)

    def _certificates(self) -> Iterator[Metric]:
        help_ = "Unix time at which the first certificate in a file ends, by setting; only with TLS."
        if ends := self.certificate_ends():
            yield _gauges("gem_certificate_expiry_timestamp_seconds", help_, "file", ends)

    def _per_worker(self) -> Iterator[Metric]:
        """One series for each live worker, counted since its current lease began. They end with the lease."""
        workers = dict(islice(self.progress.workers.copy().items(), MAX_WORKERS))

        def of_each(figure: Callable[[WorkerProgress], float]) -> dict[str, float]:
            return {name: figure(worker) for name, worker in workers.items()}

        help_ = "The worker's applied commits."
        yield _counters("gem_worker_commits", help_, "worker", of_each(lambda worker: worker.commits))
        help_ = "Sum of the staleness of the worker's applied commits."
        yield _counters("gem_worker_staleness", help_, "worker", of_each(lambda worker: worker.staleness))
        help_ = "Sum of the mean scaling factors of the worker's applied commits."
        yield _counters("gem_worker_influence", help_, "worker", of_each(lambda worker: worker.influence))
        help_ = "The worker's rejected commits."
        yield _counters("gem_worker_rejected", help_, "worker", of_each(lambda worker: worker.rejected))
        yield from self._paces()

    def _paces(self) -> Iterator[Metric]:
        """The durations of each worker's steps, and the share of a batch that they have."""
        timetable = self.core.leases.timetable
        leases = dict(islice(self.core.leases.live.copy().items(), MAX_WORKERS))
        paces = {lease.worker: timetable.pace(lease_id) for lease_id, lease in leases.items()}
        help_ = "Seconds that a whole batch takes the worker, from a reply to the next commit: a moving mean."
        known = {worker: pace for worker, pace in paces.items() if pace is not None}
        yield _gauges("gem_worker_pace_seconds", help_, "worker", known)
        help_ = "The share of a whole batch that the worker's gradients have now."
        shares = {lease.worker: timetable.share(lease_id) for lease_id, lease in leases.items()}
        yield _gauges("gem_worker_batch_share", help_, "worker", shares)

    def _training(self) -> Iterator[Metric]:
        progress = self.progress
        if progress.loss.value is not None:
            yield _gauge("gem_training_loss", "Training loss, smoothed over about 50 commits.", progress.loss.value)
        evaluation = progress.evaluation
        if evaluation is not None:
            yield _gauge("gem_evaluation_version", "Version of θ of the last evaluation.", evaluation.version)
            evaluated = self.wall(progress.evaluated_at)
            yield _gauge("gem_evaluation_timestamp_seconds", "Unix time at which the last evaluation arrived.", evaluated)
            yield _gauge("gem_evaluation_loss", "Loss on held-out data, from the last evaluation.", evaluation.loss)
            if evaluation.accuracy is not None:
                help_ = "Accuracy on held-out data, 0 to 1, from the last evaluation."
                yield _gauge("gem_evaluation_accuracy", help_, evaluation.accuracy)
        pi = progress.last.pi if progress.last else None
        if pi is not None:
            yield from self._pi.collect()
            yield from self._last_pi(pi)

    def _last_pi(self, pi: PiStatistics) -> Iterator[Metric]:
        yield _gauge("gem_pi_median", "Median of the scaling factor π over all parameters, last commit.", pi.median)
        layout = self.core.central.layout
        tensors = [tensor.name for tensor in layout.pieces[:MAX_TENSORS]] if layout else []
        medians = dict(zip(tensors, map(float, pi.tensor_medians), strict=False))
        help_ = "Median of the scaling factor π over each tensor, last commit."
        yield _gauges("gem_pi_tensor_median", help_, "tensor", medians)
        help_ = (
            "Share of parameters whose π is at a bound, last commit. zero: others moved them further than the proxy would; "
            "max: π_max."
        )
        yield _gauges("gem_pi_clamped_ratio", help_, "bound", {"zero": pi.zero_ratio, "max": pi.max_ratio})
        help_ = "Kinetic energy of the proxy, last commit; of κ√n optimizer steps if --optimizer is not sgd."
        yield _gauge("gem_proxy_energy", help_, pi.proxy_energy)
        help_ = (
            "Kinetic energy of θ's movement since the worker's snapshot, last commit; with an optimizer, of the "
            "movement that was not foreseen."
        )
        yield _gauge("gem_central_energy", help_, pi.central_energy)


class Histogram:
    """Counts values in buckets. One thread at a time adds values; another may collect meanwhile.

    A value costs a commit a quarter of a microsecond, where the client library's histogram takes ten times that.

    Args:
        name: The metric's name.
        help_: Its description.
        bounds: The buckets' upper bounds, included, lowest first.

    Attributes:
        total: The sum of the values.
    """

    def __init__(self, name: str, help_: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help_, bounds
        self._labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._labels)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def collect(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._help, buckets=self.buckets(), sum_value=self.total)

    def buckets(self) -> list[tuple[str, int]]:
        """The number of values that are at most each bound."""
        return list(zip(self._labels, accumulate(self._counts.copy()), strict=True))


class LabelledHistogram:
    """A `Histogram` for each value of a label.

    Args:
        name, help_, bounds: As of `Histogram`.
        label: The label's name.
        values: Its values.
    """

    def __init__(self, name: str, help_: str, bounds: Sequence[float], label: str, values: Iterable[str]) -> None:
        self._family = name, help_, label
        self._each = {value: Histogram(name, help_, bounds) for value in values}

    def add(self, of: str, value: float) -> None:
        self._each[of].add(value)

    def collect(self) -> HistogramMetricFamily:
        name, help_, label = self._family
        family = HistogramMetricFamily(name, help_, labels=[label])
        for value, histogram in self._each.items():
            family.add_metric([value], histogram.buckets(), histogram.total)
        return family


class PiHistogram:
    """The histogram of π over all parameters of all commits. The rule's kernel has counted π in bins (`PiStatistics`)."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)
        self._edges = np.zeros(0, np.float32)
        self._middles = np.zeros(0, np.float64)

    def add(self, pi: PiStatistics) -> None:
        if not self._counts.size:
            self._edges, self._middles = pi.edges, pi.middles
            self._counts = np.zeros_like(pi.counts)  # last: `collect`, in another thread, expects the others to be set then
        self._counts = self._counts + pi.counts

    def collect(self) -> Iterator[Metric]:
        counts, edges = self._counts, self._edges
        if not counts.size:
            return
        # A bin's lower edge is the upper bound of all bins before it. Each power of two from edges[2] on is such an edge.
        bounds = [0.0, *(octave for octave in _PI_OCTAVES if edges[2] <= octave < edges[-1])]
        buckets = [(str(bound), float(counts[: max(1, np.searchsorted(edges, bound))].sum())) for bound in bounds]
        buckets += [(str(float(edges[-1])), float(counts.sum())), ("+Inf", float(counts.sum()))]
        total = float(counts @ self._middles)
        help_ = "Scaling factor π of all parameters of all commits, binned to within 1/32; large tensors are sampled."
        yield HistogramMetricFamily("gem_pi", help_, buckets=buckets, sum_value=total)


# -- the registry


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
            labelled.samples = [one._replace(labels={**one.labels, RANGE_LABEL: self._value}) for one in family.samples]
            yield labelled


# -- samples of Prometheus


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_, value=value)


def _gauges(name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge for each value of a label."""
    family = GaugeMetricFamily(name, help_, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, help_: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_, value=value)


def _counters(name: str, help_: str, label: str, values: Mapping[Any, float]) -> Metric:
    """A counter for each value of a label."""
    family = CounterMetricFamily(name, help_, labels=[label])
    for key, count in values.items():
        family.add_metric([str(key)], count)
    return family
