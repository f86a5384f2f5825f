"""The metrics that a Prometheus server scrapes."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from gem_api.process.http_port import HttpPort
from gem_api.v1 import admin_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server import apply_loop
from kit.pauses import Pause
from kit.ports import free_address
from kit.raw_client import SMALL, Wire, wired
from kit.server import DEADLINE, Live, config, serving
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.parser import text_string_to_metric_families

# design: "Metrics"; a counter's family has no _total.
Samples = dict[tuple[str, str], float]


def test_the_port_is_served_without_asking_a_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer would hold up the start for as long as the system waits for it."""
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("asked"))
    with HttpPort("127.0.0.1", 0, make_wsgi_app(CollectorRegistry())) as port:
        assert port.server_port


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


def _train(wire: Wire) -> None:
    """A run that touches every metric: 3 commits applied, 1 repeated, 1 rejected."""
    worker, other = wire.started("worker"), wire.join("other")
    other.pull()
    for _ in range(2):
        worker.took(wire.whole("Commit", worker.header(loss=0.5), *worker.body()).answer(SMALL.size))
    other.commit()
    wire.whole("Commit", worker.header(sequence=2), *worker.body()).answer(SMALL.size)
    wire.whole("Commit", worker.header(sequence=9), *worker.body()).refusal()
    wire.call("ReportEvaluation", pb.ReportEvaluationRequest(version=3, loss=0.25, accuracy=0.75))
    wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
    other.leave()


def test_the_values_are_those_of_the_run(measured: Live) -> None:
    with wired(measured) as wire:
        _train(wire)
        seen = samples(scrape(measured))
    expected = {
        ("gem_commits_total", "applied"): 3,
        ("gem_commits_rejected_total", "SequenceGap"): 1,
        ("gem_commit_staleness_count", ""): 3,
        ("gem_pi_count", ""): 3 * SMALL.size,
        ("gem_commit_wait_seconds_count", ""): 3,
        ("gem_commit_apply_seconds_count", ""): 3,
        ("gem_leases_ended_total", "left"): 1,
        ("gem_training_loss", ""): 0.5,
        ("gem_evaluation_loss", ""): 0.25,
        ("gem_rpc_seconds_count", "Commit"): 5,
        ("gem_rpc_seconds_count", "ReportEvaluation"): 1,
        ("gem_rpc_errors_total", "SequenceGap,Commit"): 1,
        ("gem_checkpoint_version", ""): 3,
    }
    assert {key: seen.get(key) for key in expected} == expected
    assert abs(seen["gem_evaluation_timestamp_seconds", ""] - time.time()) < DEADLINE
    assert seen["gem_received_bytes_total", ""] > 3 * 4 * SMALL.size
    assert seen["gem_sent_bytes_total", ""] > 3 * 4 * SMALL.size
    assert ("gem_event_loop_lag_seconds_count", "") in seen


def test_a_worker_that_leaves_in_mid_commit_leaves_no_series(measured: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_loop, "INLINE_PARAMETERS", 0)  # so that it is applied in a thread
    applying = Pause(monkeypatch, type(measured.core.rule), "apply")
    with wired(measured) as wire:
        worker, ghost = wire.started("worker"), wire.join("ghost")
        ghost.pull()
        stream = wire.stream("Commit", ghost.header(), *ghost.body())
        applying.reached()
        ghost.leave()
        applying.end()
        assert stream.refusal().reason == "left"
        assert worker.commit()[0].version == 2  # the first was the ghost's
        assert {labels for name, labels in samples(scrape(measured)) if name == "gem_worker_commits_total"} == {"worker"}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to read them from")
def test_the_usual_metrics_of_a_process_are_served_beside_the_runs_own(measured: Live) -> None:
    seen = samples(scrape(measured))
    for name in ("resident_memory_bytes", "cpu_seconds_total", "start_time_seconds", "open_fds"):
        assert seen[f"process_{name}", ""] > 0
