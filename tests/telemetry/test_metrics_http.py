"""The metrics that a Prometheus server scrapes."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gem_api.v1 import admin_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server import apply_loop
from kit.ports import free_address
from kit.raw_client import SMALL, Wire, wired
from kit.server import DEADLINE, Live, config, serving
from prometheus_client.parser import text_string_to_metric_families

# design: "Metrics"; a counter's family has no _total.
FAMILIES = {
    "gem_central_version": "gauge",
    "gem_event_loop_lag_seconds": "histogram",
    "gem_commits": "counter",
    "gem_commit_staleness": "histogram",
    "gem_pi": "histogram",
    "gem_pi_median": "gauge",
    "gem_pi_tensor_median": "gauge",
    "gem_pi_clamped_ratio": "gauge",
    "gem_proxy_energy": "gauge",
    "gem_central_energy": "gauge",
    "gem_active_workers": "gauge",
    "gem_leases_ended": "counter",
    "gem_commit_queue_length": "gauge",
    "gem_commit_wait_seconds": "histogram",
    "gem_commit_apply_seconds": "histogram",
    "gem_received_bytes": "counter",
    "gem_sent_bytes": "counter",
    "gem_training_loss": "gauge",
    "gem_evaluation_loss": "gauge",
    "gem_evaluation_accuracy": "gauge",
    "gem_epoch": "gauge",
    "gem_shards": "gauge",
    "gem_checkpoint_version": "gauge",
    "gem_checkpoint_timestamp_seconds": "gauge",
}
Samples = dict[tuple[str, str], float]


def scrape(live: Live) -> str:
    with urllib.request.urlopen(f"http://{live.config.metrics_listen}/metrics", timeout=DEADLINE) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def samples(text: str) -> Samples:
    """Values by sample name and label values."""
    families = text_string_to_metric_families(text)
    return {(sample.name, ",".join(sample.labels.values())): sample.value for family in families for sample in family.samples}


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Live]:
    with serving(config(metrics_listen=free_address(), checkpoint_dir=tmp_path)) as live:
        yield live


@pytest.fixture
def trained(measured: Live) -> Iterator[Live]:
    """A server after a run that touched every metric: 3 commits applied, 1 repeated, 1 rejected."""
    with wired(measured) as wire:
        _train(wire)
        yield measured


def _train(wire: Wire) -> None:
    worker, other = wire.started("worker"), wire.join("other")
    other.pull()
    for _ in range(2):
        worker.took(wire.whole("Commit", worker.header(loss=0.5), *worker.body()).answer(SMALL.size))
    other.commit()
    wire.whole("Commit", worker.header(sequence=2), *worker.body()).answer(SMALL.size)
    wire.whole("Commit", worker.header(sequence=9), *worker.body()).refusal()
    for holding in ([], [1]):
        wire.call("LeaseShard", pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=300, holding=holding))
    wire.call("ReportEvaluation", pb.ReportEvaluationRequest(version=3, loss=0.25, accuracy=0.75))
    wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
    other.leave()


def test_every_metric_of_the_design_is_there_with_its_type(trained: Live) -> None:
    families = {family.name: family.type for family in text_string_to_metric_families(scrape(trained))}
    assert {name: families.get(name) for name in FAMILIES} == FAMILIES


def test_the_values_are_those_of_the_run(trained: Live) -> None:
    seen = samples(scrape(trained))
    expected = {
        ("gem_central_version", ""): 3,
        ("gem_commits_total", "applied"): 3,
        ("gem_commits_total", "repeated"): 1,
        ("gem_commits_total", "rejected"): 1,
        ("gem_commits_rejected_total", "SequenceGap"): 1,
        ("gem_worker_commits_total", "worker"): 2,
        ("gem_commit_staleness_count", ""): 3,
        ("gem_commit_staleness_sum", ""): 2,
        ("gem_pi_count", ""): 3 * SMALL.size,
        ("gem_commit_wait_seconds_count", ""): 3,
        ("gem_commit_apply_seconds_count", ""): 3,
        ("gem_active_workers", ""): 1,
        ("gem_leases_ended_total", "left"): 1,
        ("gem_leases_ended_total", "expired"): 0,
        ("gem_commit_queue_length", ""): 0,
        ("gem_training_loss", ""): 0.5,
        ("gem_evaluation_loss", ""): 0.25,
        ("gem_evaluation_accuracy", ""): 0.75,
        ("gem_epoch", ""): 0,
        ("gem_shards", "leased"): 2,
        ("gem_shards", "pending"): 0,
        ("gem_shards", "completed"): 0,
        ("gem_checkpoint_version", ""): 3,
    }
    assert {key: seen.get(key) for key in expected} == expected
    assert {labels for name, labels in seen if name == "gem_pi_tensor_median"} == {"w", "b"}
    assert {labels for name, labels in seen if name == "gem_pi_clamped_ratio"} == {"zero", "max"}
    assert seen["gem_received_bytes_total", ""] > 3 * 4 * SMALL.size
    assert seen["gem_sent_bytes_total", ""] > 3 * 4 * SMALL.size


def test_histograms_are_cumulative(trained: Live) -> None:
    families = [f for f in text_string_to_metric_families(scrape(trained)) if f.type == "histogram"]
    for family in families:
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets), family.name
        assert buckets[-1] == next(sample.value for sample in family.samples if sample.name.endswith("_count"))


def test_labels_have_few_values_however_many_workers_come_and_go(measured: Live) -> None:
    with wired(measured) as wire:
        _train(wire)
        before = samples(scrape(measured)).keys()
        for number in range(20):
            passer_by = wire.join(f"passer-by {number}")
            passer_by.pull()
            passer_by.commit()
            passer_by.leave()
        assert samples(scrape(measured)).keys() == before


def test_a_worker_that_leaves_while_its_commit_is_applied_leaves_no_series_behind(
    measured: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    applying, release, rule = threading.Event(), threading.Event(), type(measured.core.rule)
    apply = rule.apply

    def held(*arguments: Any, **named: Any) -> Any:
        applying.set()
        assert release.wait(DEADLINE)
        return apply(*arguments, **named)

    monkeypatch.setattr(apply_loop, "INLINE_PARAMETERS", 0)  # so that it is applied in a thread
    monkeypatch.setattr(rule, "apply", held)
    with wired(measured) as wire:
        worker, ghost = wire.started("worker"), wire.join("ghost")
        ghost.pull()
        stream = wire.stream("Commit", ghost.header(), *ghost.body())
        assert applying.wait(DEADLINE)
        ghost.leave()
        release.set()
        assert stream.refusal().reason == "left"
        assert worker.commit()[0].version == 2  # the first was the ghost's
        assert {labels for name, labels in samples(scrape(measured)) if name == "gem_worker_commits_total"} == {"worker"}


def test_every_name_has_the_prefix_and_help(measured: Live) -> None:
    families = list(text_string_to_metric_families(scrape(measured)))
    assert families
    for family in families:
        assert re.fullmatch(r"(gem|process)_[a-z_]+", family.name)
        assert family.documentation


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to read them from")
def test_the_usual_metrics_of_a_process_are_served_beside_the_runs_own(measured: Live) -> None:
    seen = samples(scrape(measured))
    for name in (
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        "process_start_time_seconds",
        "process_open_fds",
    ):
        assert seen[name, ""] > 0
    assert ("gem_central_version", "") in seen


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("when", ["at the start", "after training"])
def test_promtool_finds_nothing_to_say(when: str, measured: Live) -> None:
    if when == "after training":
        with wired(measured) as wire:
            _train(wire)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(measured), capture_output=True, text=True, timeout=DEADLINE
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
