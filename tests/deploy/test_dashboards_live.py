"""A real Prometheus scrapes real servers, one alone and two that hold a range each: every query of the dashboards has a result,
about its run alone, and what both ranges count is shown once. The alerts can be evaluated."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from client.range_helpers import GRADIENT, Ranges, large_model, ranges
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.http_port import serve_metrics
from gem_client import Session
from gem_dashboards.boards import DASHBOARDS, EVENTS
from gem_dashboards.panels import Event, Query
from gem_dashboards.range_board import RANGES
from gem_worker.process.metrics import WorkerMetrics
from kit.crew import beginning, crew
from kit.ports import free_address
from kit.prometheus import CONFIGURATION, SCRAPE, Prometheus, Series, fill_in, watching
from kit.server import DEADLINE, wait_until
from prometheus_client import CollectorRegistry

pytestmark = pytest.mark.long
WINDOW = 4 * SCRAPE
LEADER, ALONE = 'a "server" \\ [x].*+ <b>', "alone"  # what the servers' instances are called
PANELS = {f"{board.uid}: {panel.title}": panel for board in DASHBOARDS for panel in board.panels}
QUERIES = {f"{where}, {number}": query for where, panel in PANELS.items() for number, query in enumerate(panel.queries)}


@dataclass
class Watched:
    """Two ranges and another server in training, and the Prometheus that scrapes them."""

    run: Ranges
    client: Prometheus
    began: float

    def series(self, expression: str, server: str = LEADER) -> list[Series]:
        """What Grafana would show for a server: the series with numbers."""
        query = fill_in(expression, server, WINDOW)
        found = self.client.range(query, self.began, time.time(), SCRAPE)
        return [one for one in found if np.isfinite(one.values).any()]

    def wait(self, query: Query, server: str = LEADER) -> list[Series]:
        found: list[Series] = wait_until(lambda: self.series(query.expr, server), f"data of {server}: {query.expr}", DEADLINE)
        return found

    def newest(self, where: str) -> float:
        """The newest value of the only line of a panel's query."""
        (line,) = self.wait(QUERIES[where])
        return float(line.values[np.isfinite(line.values)][-1])

    def shows_nothing_of_nobody(self, expression: str) -> bool:
        return not any(np.nan_to_num(one.values).any() for one in self.series(expression, "nobody"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder, began, worker = tmp_path_factory.mktemp("prometheus"), time.time(), free_address()
    registry = CollectorRegistry()
    serve_metrics(worker, registry)
    timed = WorkerMetrics(registry)
    settings: dict[str, Any] = {
        "metrics_listen": "127.0.0.1:0",
        "memory_limit": 10**9,
        "settings": Hyperparameters(reply_wait=0.15),
    }
    with (
        ranges(folder / "run", 2, **settings) as run, training(run, timed),
        ranges(folder / "alone", 1, **settings) as alone, training(alone, timed),
    ):  # fmt: skip
        names = {LEADER: run.lives[0], "second": run.lives[1], ALONE: alone.lives[0]}
        servers = [
            {"targets": [live.server.wiring.endpoint.http_address], "labels": {"instance": name}}
            for name, live in names.items()
        ]
        with watching(folder, {"gem-server": servers, "gem-worker": [{"targets": [worker]}]}) as client:
            yield Watched(run, client, began)


@contextmanager
def training(run: Ranges, metrics: WorkerMetrics) -> Iterator[None]:
    """Two workers that commit, and time their steps; another has sent a gradient that the last range alone rejects."""

    def work(session: Session, enough: threading.Event) -> None:
        for _ in metrics.timing("data", iter(lambda: enough.wait(0.05), True)):
            with metrics.phase("compute"):
                metrics.trained(0.5, 0.1)
            with metrics.phase("exchange"):
                session.commit(GRADIENT, loss=0.5, samples=8)

    partly = GRADIENT.copy()
    partly[-1] = np.nan
    beginning(run.address, large_model(), GRADIENT, partly)
    with crew(run.address, large_model(), work):
        yield


@pytest.mark.parametrize("where", QUERIES)
def test_a_query_has_an_answer_for_its_server_alone_with_what_its_legend_shows(watched: Watched, where: str) -> None:
    query = QUERIES[where]
    shown = set(re.findall(r"{{\s*(\w+)\s*}}", query.legend))
    for server in (LEADER, *(() if where.startswith(RANGES.uid) else (ALONE,))):
        assert all(shown <= one.labels.keys() for one in watched.wait(query, server))
    assert watched.shows_nothing_of_nobody(query.expr)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_a_mark_is_about_the_chosen_server_alone(watched: Watched, event: Event) -> None:
    assert watched.shows_nothing_of_nobody(event.expr)


def test_each_range_has_a_line_and_what_both_servers_count_is_counted_once(watched: Watched) -> None:
    for panel in RANGES.panels:
        if "{{range}}" in panel.queries[0].legend:
            lines = {line.labels["range"] for line in watched.wait(panel.queries[0])}
            assert lines == ({"1"} if "Rejected" in panel.title else {"0", "1"}), panel.title
    leader = watched.run.lives[0]
    wait_until(lambda: watched.newest("gem-training: Active workers, 0") == 2, "two workers")
    assert watched.newest("gem-training: Commits, 0") <= leader.on_loop(lambda: leader.core.central.version)
    rates = watched.client.values('sum by (range) (rate(gem_commits_total{outcome="applied", range!=""}[1m]))', time.time())
    rate = np.mean([one.values[0] for one in rates])
    assert watched.newest("gem-training: Commits per second, 0") == pytest.approx(rate, rel=0.5)
    memory = "gem-server: Memory for the model and the workers"
    assert watched.newest(f"{memory}, 1") == 2 * 10**9
    assert watched.newest(f"{memory}, 0") > 1.5 * leader.on_loop(lambda: leader.core.memory.held)
    wait_until(lambda: watched.newest("gem-ranges: Ranges missing, 0") == 0, "both ranges")
    assert watched.newest("gem-server: Server answers, 0") == 1


def test_every_rule_of_the_alerts_can_be_evaluated(watched: Watched) -> None:
    def rules() -> list[Any]:
        return [rule for group in watched.client.api("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "the rules to be evaluated")
    assert [(rule["name"], rule.get("lastError")) for rule in rules() if rule["health"] != "ok"] == []
    assert any(rule["type"] == "alerting" for rule in rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    command = ["promtool", "check", "config", str(CONFIGURATION)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
