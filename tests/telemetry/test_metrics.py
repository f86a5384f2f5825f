"""The server's metrics. Each test has its own registry, and reads its samples."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_server.commit_times import CommitTimes
from gem_server.core.leases import Lease
from gem_server.core.state_machine import Core
from gem_server.core.values import EndReason, Outcome
from gem_server.telemetry.metrics import MAX_TENSORS, Metrics
from gem_server.telemetry.progress import TRANSPORTS, Evaluation, Progress, Traffic
from gem_server.telemetry.rpc_metrics import RpcMetrics
from gem_worker.process.metrics import WorkerMetrics
from kit.core import SMALL, commit, header, make_core, start
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

# Every metric of the design, as Prometheus names its family, by type.
TYPES = {
    "counter": {"gem_commits", "gem_leases_ended", "gem_received_bytes", "gem_sent_bytes"},
    "histogram": {"gem_commit_staleness", "gem_pi", "gem_commit_wait_seconds", "gem_commit_apply_seconds"},
    "gauge": {
        "gem_central_version", "gem_pi_median", "gem_pi_tensor_median", "gem_pi_clamped_ratio", "gem_proxy_energy",
        "gem_central_energy", "gem_active_workers", "gem_commit_queue_length", "gem_training_loss", "gem_evaluation_loss",
        "gem_evaluation_accuracy", "gem_epoch", "gem_shards", "gem_checkpoint_version", "gem_checkpoint_timestamp_seconds",
    },
}  # fmt: skip
PROMISED = {name for names in TYPES.values() for name in names}


@dataclass
class Watched:
    """A core, its progress, and the registry that shows both."""

    core: Core
    progress: Progress
    traffic: Traffic
    registry: CollectorRegistry
    metrics: Metrics
    queued: int = 0

    def commit(self, lease_id: str, gradient: Any = 1.0, waited: float = 0.01, **changes: Any) -> None:
        sequence = self.core.leases.get(lease_id).sequence + 1
        applied = commit(self.core, lease_id, sequence, gradient, **changes)
        for observe in (self.progress.applied, self.metrics.applied):
            observe(applied, CommitTimes(rule_began=waited, applied=waited + 0.002))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def values(self, name: str, label: str) -> dict[str, float]:
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        return {sample.labels[label]: sample.value for sample in samples if sample.name == name}

    def families(self) -> set[str]:
        return {family.name for family in self.registry.collect()}


def watched(layout: Layout = SMALL, **settings: Any) -> Watched:
    core = make_core(Hyperparameters(**settings), memory_limit=10**9)
    registry, progress, traffic = CollectorRegistry(), Progress(started=0.0), Traffic()
    ends = {"tls_cert": 2e9, "tls_client_ca": 3e9}
    metrics = Metrics(
        registry, core, progress, traffic, lambda: watch.queued, lambda at: 1e9 + at, lane=True, certificate_ends=lambda: ends,
        waiting_for_memory=lambda: 5,
    )  # fmt: skip
    RpcMetrics(registry, lambda: 0.0).failed("Commit", "NonFiniteGradient")
    watch = Watched(core, progress, traffic, registry, metrics)
    start(core, ["ann", "bob"], layout)
    return watch


def after_everything() -> Watched:
    """A run in which all that can be measured has happened."""
    watch = watched()
    for now in (0.0, 1.0, 2.0):  # a first step, and one that shows the worker's pace
        watch.commit("lease-1", loss=0.7, now=now)
    watch.progress.evaluated(Evaluation(1, 0.3, 0.9), now=0.0)
    watch.progress.checkpointed(1, 50.0)
    return watch


def test_every_promised_metric_is_exported_with_its_type_a_prefix_and_a_help_text() -> None:
    text = generate_latest(after_everything().registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for kind, names in TYPES.items():
        assert {name: families[name].type for name in names} == dict.fromkeys(names, kind)
    for family in families.values():
        assert re.fullmatch(r"gem_[a-z_]+", family.name)
        assert family.documentation.endswith(".")


@pytest.mark.parametrize("rule", ["gem", "downpour", "adaptive"])
def test_what_has_no_value_yet_is_absent_rather_than_zero(rule: str) -> None:
    watch = watched(rule=rule)
    absent = {name for name in PROMISED if name.startswith(("gem_pi", "gem_training", "gem_evaluation", "gem_checkpoint"))}
    absent |= {"gem_proxy_energy", "gem_central_energy"}
    assert absent & watch.families() == set()
    watch.commit("lease-1", loss=None)
    assert ("gem_pi" in watch.families()) == (rule == "gem")
    assert "gem_training_loss" not in watch.families()


def test_counters_with_a_label_have_all_of_its_values_from_the_start() -> None:
    watch = watched()
    all_values: dict[str, tuple[str, Iterable[str]]] = {
        "gem_commits": ("outcome", Outcome), "gem_commits_received": ("transport", TRANSPORTS),
        "gem_leases_ended": ("reason", EndReason),
    }  # fmt: skip
    for name, (label, values) in all_values.items():
        assert watch.values(f"{name}_total", label) == {str(value): 0 for value in values}
    watch.commit("lease-1")
    watch.core.admit(header(watch.core, "lease-1", 1), 0.0)
    for transport in ("memory", "grpc", "grpc"):
        watch.progress.record_transport("ann", transport)
    watch.core.leave("lease-1")
    watch.core.expire(1e9)
    assert watch.values("gem_commits_total", "outcome") == {"applied": 1, "repeated": 1, "rejected": 0, "discarded": 0}
    assert watch.values("gem_commits_received_total", "transport") == {"memory": 1, "tcp": 0, "tls": 0, "grpc": 2}
    ended = watch.values("gem_leases_ended_total", "reason")
    assert {reason: count for reason, count in ended.items() if count} == {"left": 1, "expired": 1}
    assert watch.value("gem_active_workers") == 0


def test_workers_over_grpc_are_counted_until_they_are_back_on_the_lane_or_leave() -> None:
    watch = watched()
    for worker, transport in (("ann", "grpc"), ("bob", "grpc"), ("eve", "memory"), ("dan", "tls")):
        watch.progress.record_transport(worker, transport)
    assert watch.value("gem_fallen_back_workers") == 2
    watch.progress.record_transport("ann", "tcp")
    assert watch.value("gem_fallen_back_workers") == 1
    watch.progress.forget("bob")
    assert watch.value("gem_fallen_back_workers") == 0


def test_gauges_say_what_is_so_when_they_are_asked() -> None:
    watch = watched(shard_size=100, epochs=2)
    for holding in ((), {1}, {1, 2}):
        watch.core.lease_shard("lease-1", 550, 0.0, holding=set(holding))
    watch.core.complete_shard("lease-1", 1, 0.0)
    watch.commit("lease-1", samples=64)
    lane = watch.traffic.begin()
    watch.traffic.grpc.received, lane.received, lane.sent, watch.queued = 1, 10, 22, 3
    watch.progress.checkpointed(7, 50.0)
    watch.progress.evaluated(Evaluation(5, 0.3, None), now=60.0)
    expected = {
        "gem_central_version": 1, "gem_active_workers": 2, "gem_commit_queue_length": 3, "gem_received_bytes_total": 11,
        "gem_sent_bytes_total": 22, "gem_memory_bytes": watch.core.memory.held, "gem_memory_limit_bytes": 10**9,
        "gem_worker_memory_bytes": 4 * 9 * 2, "gem_uploads_waiting_for_memory": 5,
        "gem_epoch": 0, "gem_samples_committed_total": 64, "gem_run_complete": 0, "gem_parameters": 9,
        "gem_checkpoint_version": 7, "gem_checkpoint_timestamp_seconds": 1e9 + 50,
        "gem_evaluation_version": 5, "gem_evaluation_loss": 0.3, "gem_evaluation_timestamp_seconds": 1e9 + 60,
    }  # fmt: skip
    assert {name: watch.value(name) for name in expected} == expected
    assert watch.values("gem_shards", "state") == {"pending": 3, "leased": 2, "completed": 1}
    assert "gem_evaluation_accuracy" not in watch.families()


def test_timings_and_staleness_are_histograms() -> None:
    watch = watched()
    watch.commit("lease-1", waited=0.03)
    watch.commit("lease-2", waited=20.0)
    assert (watch.value("gem_commit_wait_seconds_sum"), watch.value("gem_commit_wait_seconds_count")) == (20.03, 2)
    assert watch.value("gem_commit_wait_seconds_bucket", le="0.05") == 1
    assert watch.value("gem_commit_wait_seconds_bucket", le="10.0") == 1
    assert watch.value("gem_commit_apply_seconds_sum") == pytest.approx(0.004)
    assert watch.value("gem_commit_staleness_bucket", le="0.0") == 1
    assert watch.value("gem_commit_staleness_bucket", le="1.0") == 2
    assert watch.value("gem_commit_staleness_sum") == 1


def test_the_last_commits_pi_is_shown_over_all_and_by_tensor() -> None:
    """Ann moves the bias far; then bob's bias is clamped to 0, and his weight to π_max by a moment that faces a tiny Δ."""
    watch = watched()
    far = np.array([0] * 6 + [100] * 3, np.float32)
    watch.commit("lease-1", far)
    watch.commit("lease-2", 1.0)
    medians = watch.values("gem_pi_tensor_median", "tensor")
    assert medians["bias"] == 0
    assert medians["weight"] == pytest.approx(1, rel=1 / 16)
    assert watch.values("gem_pi_clamped_ratio", "bound") == {"zero": pytest.approx(3 / 9), "max": 0}
    assert watch.value("gem_pi_median") == pytest.approx(1, rel=1 / 16)
    watch.commit("lease-1", np.full(9, 1e-3))
    assert watch.values("gem_pi_clamped_ratio", "bound")["max"] == pytest.approx(3 / 9)
    assert watch.value("gem_proxy_energy") == pytest.approx(watch.progress.last.pi.proxy_energy)  # type: ignore[union-attr]


def test_labels_are_bounded_however_many_tensors_a_model_has() -> None:
    watch = watched(Layout.of({f"t{number}": (1,) for number in range(MAX_TENSORS + 100)}))
    watch.commit("lease-1")
    assert len(watch.values("gem_pi_tensor_median", "tensor")) == MAX_TENSORS


def test_a_worker_has_no_loss_and_no_rate_before_its_first_batch() -> None:
    """A 0 would be the lowest loss of all workers."""
    registry = CollectorRegistry()
    worker = WorkerMetrics(registry)
    assert registry.get_sample_value("gem_worker_loss") is None
    assert registry.get_sample_value("gem_worker_learning_rate") is None
    for loss in (0.5, 0.25):
        worker.trained(loss, loss / 10)
        assert registry.get_sample_value("gem_worker_loss") == loss
        assert registry.get_sample_value("gem_worker_learning_rate") == loss / 10


def test_the_training_loss_is_smoothed_without_bias() -> None:
    """An exponential average with Adam's correction (Kingma & Ba 2015, section 3): the first loss has no extra weight."""
    losses = [2.5, 1.0, 0.5, 0.25, 0.75]
    watch = watched()
    for loss in losses:
        watch.commit("lease-1", loss=loss)
        watch.commit("lease-1", loss=float("nan"))
        watch.commit("lease-1", loss=float("inf"))
    average = 0.0
    for loss in losses:
        average = 0.98 * average + 0.02 * loss
    assert watch.value("gem_training_loss") == pytest.approx(average / (1 - 0.98 ** len(losses)))
    assert watch.value("gem_nonfinite_losses_total") == 2 * len(losses)


# -- the histogram of π


def pi_buckets(watch: Watched) -> dict[float, float]:
    return {float(bound): count for bound, count in watch.values("gem_pi_bucket", "le").items()}


def known_pi(watch: Watched, pi: np.ndarray) -> None:
    """A commit of lease-1 with these π: Δ = −1 and a moment of |m| = π (Eqs. 19, 24)."""
    watch.core.leases.get("lease-1").buffers["moment"][:] = -2 * (pi.astype(np.float64) - 1)
    watch.commit("lease-1", 1.0)


@pytest.mark.parametrize("pi_max", [0.5, 4.0, 5.0, 1e3, 1e6])
def test_a_bucket_never_counts_a_pi_above_its_bound(pi_max: float) -> None:
    """And never leaves one out that is clearly below it (a π on the bound itself may count with the next)."""
    size = 2000
    watch = watched(Layout.of({"w": (size,)}), learning_rate=1.0, momentum=0.5, pi_max=pi_max)
    wanted = 10.0 ** np.random.default_rng(1).uniform(-4, np.log10(2 * pi_max), size)
    known_pi(watch, wanted)
    moment = np.abs(watch.core.leases.get("lease-1").buffers["moment"])
    pi = np.minimum(moment, np.float32(pi_max))
    for bound, count in pi_buckets(watch).items():
        assert count <= (pi <= bound).sum(), f"le={bound}"
        if bound >= pi_max * 2.0**-15:  # bins reach 15.8 octaves below π_max
            assert count >= (pi < bound).sum(), f"le={bound}"


def test_the_histogram_adds_up_over_commits() -> None:
    watch = watched()
    for lease_id in ("lease-1", "lease-2", "lease-1"):
        watch.commit(lease_id)
    buckets = pi_buckets(watch)
    assert list(buckets) == sorted(buckets)
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets[float("inf")] == buckets[5.0] == watch.value("gem_pi_count") == 27


def test_the_sum_of_pi_is_exact_to_half_a_bin() -> None:
    watch = watched(Layout.of({"w": (1000,)}), learning_rate=1.0, momentum=0.5)
    pi = np.random.default_rng(2).uniform(0, 7, 1000)
    known_pi(watch, pi)
    assert watch.value("gem_pi_sum") == pytest.approx(np.minimum(pi, 5).sum(), rel=1 / 32)


# -- per worker


def test_each_live_worker_shows_its_commits_their_staleness_and_their_influence() -> None:
    watch = watched()
    for lease_id in ("lease-1", "lease-1", "lease-2"):
        watch.commit(lease_id)
    assert watch.values("gem_worker_commits_total", "worker") == {"ann": 2, "bob": 1}
    assert watch.values("gem_worker_staleness_total", "worker") == {"ann": 0, "bob": 2}
    assert watch.values("gem_worker_batch_share", "worker") == {"ann": 1, "bob": 1}
    assert after_everything().values("gem_worker_pace_seconds", "worker") == {"ann": 1.0}
    influence = watch.values("gem_worker_influence_total", "worker")
    assert sum(influence.values()) == pytest.approx(watch.value("gem_pi_sum") / 9)  # type: ignore[operator]


@pytest.mark.parametrize(("rule", "influence"), [("downpour", 2.0), ("adaptive", 1 + 1 / 3)])
def test_the_influence_of_a_commit_is_what_its_rule_made_of_it(rule: str, influence: float) -> None:
    watch = watched(rule=rule)
    watch.commit("lease-1")
    watch.commit("lease-2")
    watch.commit("lease-1", base_version=0)
    assert watch.value("gem_worker_influence_total", worker="ann") == pytest.approx(influence)


def test_the_run_is_described_by_its_settings_and_the_server_by_its_versions() -> None:
    described = {family.name: family.samples[0].labels for family in watched(kappa=2.0).registry.collect() if family.samples}
    run = described["gem_run"]
    assert (run["run_id"], run["rule"], run["kappa"]) == ("run", "gem", "2.0")
    assert described["gem_build"].keys() == {"version", "python", "grpcio", "numba", "numpy"}


# -- the exposition


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say_about_the_exposition() -> None:
    text = generate_latest(after_everything().registry)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_scrape_stands_workers_that_come_and_go_and_new_errors_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape runs beside the server: what it reads changes whenever Python code of its own runs in between."""
    watch, numbers = after_everything(), itertools.count()
    watch.progress.count_rejected("ann", "SequenceGap")

    def come_and_go() -> None:
        number = next(numbers)
        name = f"passer-by {number}"
        watch.core.leave(watch.core.register(name, SMALL, 0.0).lease_id)
        watch.core.register(name, SMALL, 0.0)
        watch.progress.count_rejected(name, f"Error{number}")

    def disturbed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            come_and_go()
            return original(*arguments, **named)

        return call

    monkeypatch.setattr(Lease, "nbytes", property(disturbed(vars(Lease)["nbytes"].fget)))
    for family in (CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily):
        monkeypatch.setattr(family, "add_metric", disturbed(family.add_metric))
    assert watch.families() >= PROMISED
    assert next(numbers) > len(PROMISED)
