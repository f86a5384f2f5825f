"""A real Prometheus, configured as the operator does from the chart's objects, watches two runs in one namespace.

Real servers and workers stand for the pods. Their dashboards don't mix, and the death of a server fires an alert of its run
alone. What fires the other alerts: deploy/prometheus/alerts_test.yml, also with a release's labels (test_chart_alerts.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from engines.chart import found, objects
from engines.monitoring import Release, endpoints, pods, render, scrape_config
from gem_client import Admin
from gem_dashboards.boards import ALERTS, DASHBOARDS
from gem_dashboards.range_board import RANGES
from kit.ports import free_address
from kit.process import running
from kit.prometheus import Prometheus, fill_in, started
from kit.server import wait_until
from kit.settings import configured

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")

INTERVAL = "1s"  # between two scrapes, and two evaluations of the rules
WINDOW = 4.0  # seconds of rates
PATIENCE = 120.0  # seconds for what takes an alert's `for`, on a busy machine


@dataclass
class Run:
    """A release whose pods are processes of this machine.

    Attributes:
        release: The release.
        address: The server's address for gRPC.
        metrics: The address of its metrics.
        workers: The address of each worker's metrics, by the name of its pod.
        server: The server's process.
    """

    release: Release
    address: str
    metrics: str
    workers: dict[str, str]
    server: subprocess.Popen[bytes]

    @property
    def instance(self) -> str:
        return f"{self.release.namespace}/{self.release.server_pod}"

    def target(self, component: str, pod: str) -> dict[str, str]:
        """The labels that a target must have."""
        own = {"endpoint": "http", "service": f"{self.release.name}-gem"} if component == "server" else {"endpoint": "metrics"}
        return {
            "job": f"gem-{component}", "run": self.release.run, "instance": f"ml/{pod}",
            "namespace": "ml", "pod": pod, "container": component, **own,
        }  # fmt: skip


@dataclass
class Watched:
    """Two runs and the Prometheus that watches them.

    Attributes:
        first: It has two workers.
        second: It has one worker.
        client: Prometheus.
        began: Unix seconds.
    """

    first: Run
    second: Run
    client: Prometheus
    began: float

    def has(self, query: str) -> bool:
        """Whether a query has had numbers."""
        series = self.client.range(query, self.began, time.time(), 1)
        return any(np.isfinite(one.values).any() for one in series)

    def value(self, query: str) -> float | None:
        return self.client.value(query, time.time())

    def firing(self) -> list[dict[str, Any]]:
        return [alert for alert in self.client.api("alerts")["alerts"] if alert["state"] == "firing"]

    def fired(self, name: str) -> dict[str, Any]:
        """Waits until an alert of this name fires, and returns it. Fails if there are several."""
        found = wait_until(
            lambda: [alert for alert in self.firing() if alert["labels"]["alertname"] == name], f"{name} to fire", PATIENCE
        )
        assert len(found) == 1, found
        return dict(found[0])


def scaling_query(name: str) -> str:
    """What KEDA asks Prometheus for a release of this name."""
    autoscaling = {"worker": {"autoscaling": {"enabled": True}}, "metrics": {"serviceMonitor": {"enabled": True}}}
    (trigger,) = found(objects(autoscaling, name), "ScaledObject")["spec"]["triggers"]
    return str(trigger["metadata"]["query"])


@contextmanager
def a_run(folder: Path, name: str, workers: int) -> Iterator[Run]:
    """A run: a server, and workers on the digits, each with a pod's name."""
    address, metrics = free_address(), free_address()
    server = [
        f"--listen={address}", f"--metrics-listen={metrics}", "--until-stopped",
        f"--checkpoint-dir={folder / name}", "--durability=log",
        configured(memory_socket="off", checkpoint_interval=0, reply_wait=0.15),
    ]  # fmt: skip
    crew = {f"{name}-gem-worker-{number}": free_address() for number in range(workers)}
    release = render("ml", name)
    with ExitStack() as stack:
        served = stack.enter_context(running(folder / f"{name}-server", "-m", "gem_server", *server)).process
        for pod, at in crew.items():
            options = [f"--server={address}", f"--name={pod}", f"--metrics-listen={at}", "--threads=1"]
            stack.enter_context(running(folder / pod, "-m", "gem_worker", *options, configured(step_seconds=0.2)))
        yield Run(release, address, metrics, crew, served)


@contextmanager
def prometheus(folder: Path, runs: list[Run]) -> Iterator[Prometheus]:
    """Prometheus with what the operator makes of the releases' monitors and rules. Each monitor sees both releases' pods."""
    services = [target for run in runs for target in endpoints(run.release, run.metrics)]
    containers = [target for run in runs for target in pods(run.release, run.workers)]
    discovered = {"ServiceMonitor": services, "PodMonitor": containers}
    for run in runs:
        rules = yaml.safe_dump(run.release.one("PrometheusRule")["spec"])
        (folder / f"{run.release.name}-rules.yaml").write_text(rules, encoding="utf-8")
    settings = {
        "global": {
            "scrape_interval": INTERVAL,
            "evaluation_interval": INTERVAL,
            "external_labels": {"prometheus": "monitoring/k8s", "prometheus_replica": "prometheus-k8s-0"},
        },
        "rule_files": [f"{folder}/*-rules.yaml"],
        "scrape_configs": [
            scrape_config(run.release, kind, found, INTERVAL) for run in runs for kind, found in discovered.items()
        ],
    }
    with started(folder, settings) as client:
        yield client


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two runs that train, with an evaluation and a checkpoint."""
    folder, began = tmp_path_factory.mktemp("watched"), time.time()
    with ExitStack() as stack:
        first = stack.enter_context(a_run(folder, "first", 2))
        second = stack.enter_context(a_run(folder, "second", 1))
        client = stack.enter_context(prometheus(folder, [first, second]))
        watch = Watched(first, second, client, began)
        for run in (first, second):
            committed = f'gem_central_version{{instance="{run.instance}"}} > 20'
            wait_until(partial(watch.value, committed), f"{run.instance} to train", PATIENCE)
            with Admin(run.address) as admin:
                admin.report_evaluation(1, 0.5, 0.75 if run is first else 0.25)
                admin.checkpoint()
        yield watch


# -- targets


def test_each_server_and_worker_is_scraped_once_with_the_labels_of_the_rules(watched: Watched) -> None:
    wanted = [run.target("server", run.release.server_pod) for run in (watched.first, watched.second)]
    wanted += [run.target("worker", pod) for run in (watched.first, watched.second) for pod in run.workers]
    targets = watched.client.api("targets", state="active")["activeTargets"]
    assert sorted((target["labels"] for target in targets), key=str) == sorted(wanted, key=str)
    wait_until(lambda: watched.value("sum(up)") == len(wanted), "every target to answer")


# -- one run of two


def test_every_panel_has_data_for_one_run_of_two(watched: Watched) -> None:
    for run in (watched.first, watched.second):
        for board in (board for board in DASHBOARDS if board is not RANGES):  # each server holds everything
            for panel in board.panels:
                for query in panel.queries:
                    if re.search("rejected|leases_ended|rpc_errors", query.expr):
                        continue  # nothing of that happened
                    filled = fill_in(query.expr, run.instance, WINDOW)
                    wait_until(partial(watched.has, filled), f"data for {panel.title}: {filled}")


def test_the_workers_of_the_other_run_are_on_no_panel(watched: Watched) -> None:
    queries = [query.expr for board in DASHBOARDS for panel in board.panels for query in panel.queries]
    (reachable,) = [expr for expr in queries if expr.startswith('sum(up{job="gem-worker"}')]
    for run in (watched.first, watched.second):
        shown = fill_in(reachable, run.instance, WINDOW)
        assert watched.client.value(f"max_over_time(({shown})[1m:1s])", time.time()) == len(run.workers)
    ours = 'max(process_resident_memory_bytes{run="ml/second", job="gem-worker"})'
    (largest,) = [expr for expr in queries if expr.startswith('max(process_resident_memory_bytes{job="gem-worker"}')]
    at = time.time()
    assert watched.client.value(fill_in(largest, watched.second.instance, WINDOW), at) == watched.client.value(ours, at)


# -- the number of workers


def test_the_autoscaler_is_told_how_many_workers_of_its_run_compute(watched: Watched) -> None:
    for run in (watched.first, watched.second):
        query = scaling_query(run.release.name).replace("[2m]", f"[{WINDOW:g}s]")
        count = len(run.workers)
        wait_until(partial(watched.has, f"({query}) > {0.7 * count} < {1.1 * count}"), f"{count} workers that compute: {query}")


# -- faults


def test_a_server_that_is_killed_fires(watched: Watched) -> None:
    watched.second.server.kill()
    alert = watched.fired("GemServerDown")
    assert alert["labels"] == {
        "alertname": "GemServerDown", "severity": "critical",
        **watched.second.target("server", "second-gem-server-0"),
    }  # fmt: skip
    assert alert["annotations"]["summary"] == "gem-server ml/second-gem-server-0 does not respond"
    assert "First see why it ended" in alert["annotations"]["description"]


def test_nothing_else_fired_and_a_dashboard_counts_the_alerts_of_its_run(watched: Watched) -> None:
    count = ALERTS.queries[0].expr
    names = {(alert["labels"]["alertname"], alert["labels"]["run"]) for alert in watched.firing()}
    assert names == {("GemServerDown", "ml/second")}
    assert watched.value(fill_in(count, watched.first.instance, WINDOW)) == 0
    assert watched.value(fill_in(count, watched.second.instance, WINDOW)) == 1
