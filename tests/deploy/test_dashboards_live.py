"""A real Prometheus scrapes a real server: every query of the dashboards has a result, and the alerts can be evaluated."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.http_port import serve_metrics
from gem_client import Session
from gem_dashboards.boards import DASHBOARDS, EVENTS
from gem_dashboards.panels import Event
from gem_dashboards.range_board import RANGES
from gem_worker.process.metrics import WorkerMetrics
from kit.crew import beginning, crew
from kit.model import GRADIENT, SIZE, model
from kit.ports import free_address
from kit.prometheus import CONFIGURATION, SCRAPE, Prometheus, fill_in, watching
from kit.server import DEADLINE, Live, config, serving, wait_until
from prometheus_client import CollectorRegistry

pytestmark = pytest.mark.long
WINDOW = 4 * SCRAPE
ODD = 'a "server" \\ [x].*+ <b>'  # what the server's instance is called
GONE = 'gem_run_info{run_id="gone",rule="gem"} 1\ngem_central_version 7\n'
QUERIES = {
    f"{board.uid}: {panel.title}, {number}": query
    for board in DASHBOARDS
    if board is not RANGES  # that one: test_dashboards_live_ranges.py
    for panel in board.panels
    for number, query in enumerate(panel.queries)
}


@dataclass
class Watched:
    """The Prometheus that scrapes a server in training, and when that began, in Unix seconds."""

    client: Prometheus
    began: float

    def has(self, query: str) -> Callable[[], bool]:
        """Whether Prometheus has numbers for a query."""

        def look() -> bool:
            return any(np.isfinite(one.values).any() for one in self.client.range(query, self.began, time.time(), SCRAPE))

        return look

    def shows(self, expression: str, server: str) -> bool:
        """Whether Grafana would show any number but 0 for this server."""
        series = self.client.range(fill_in(expression, server, WINDOW), self.began, time.time(), SCRAPE)
        return any(np.nan_to_num(one.values).any() for one in series)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server with two workers that go on committing, one worker process's metrics, and a server that has gone again."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    metrics, worker = free_address(), free_address()
    registry = CollectorRegistry()
    serve_metrics(worker, registry)
    began = time.time()
    settings = Hyperparameters(reply_wait=0.15)
    configuration = config(settings, metrics_listen=metrics, checkpoint_dir=folder / "checkpoints", memory_limit=10**9)
    with serving(configuration) as live, training(live, WorkerMetrics(registry)), short_lived() as (gone, end):
        servers = [{"targets": [metrics], "labels": {"instance": ODD}}, {"targets": [gone], "labels": {"instance": "gone"}}]
        targets = {"gem-server": servers, "gem-worker": [{"targets": [worker]}]}
        with watching(folder, targets) as client:
            watch = Watched(client, began)
            wait_until(watch.has('gem_run_info{run_id="gone"}'), "the short-lived server to be scraped")
            end()
            yield watch


@contextmanager
def training(live: Live, metrics: WorkerMetrics) -> Iterator[None]:
    """Two workers that commit, and time their steps."""

    def work(session: Session, enough: threading.Event) -> None:
        for _ in metrics.timing("data", iter(lambda: enough.wait(0.02), True)):
            with metrics.phase("compute"):
                metrics.trained(0.5, 0.1)
            with metrics.phase("exchange"):
                session.commit(GRADIENT, loss=0.5, samples=8)

    beginning(live.address, model(), GRADIENT, np.full(SIZE, np.nan, np.float32))
    with crew(live.address, model(), work):
        yield


@contextmanager
def short_lived() -> Iterator[tuple[str, Callable[[], None]]]:
    """The metrics of a server that is there until it is ended: its address, and what ends it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(GONE.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield f"127.0.0.1:{server.server_port}", end
    finally:
        end()


@pytest.mark.parametrize("where", QUERIES)
def test_a_query_has_an_answer_for_its_server_alone_with_what_its_legend_shows(watched: Watched, where: str) -> None:
    expression = fill_in(QUERIES[where].expr, ODD, WINDOW)
    wait_until(watched.has(expression), "data")
    shown = set(re.findall(r"{{\s*(\w+)\s*}}", QUERIES[where].legend))
    assert all(shown <= one.labels.keys() for one in watched.client.range(expression, watched.began, time.time(), SCRAPE))
    assert not watched.shows(QUERIES[where].expr, "nobody")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_a_mark_is_about_the_chosen_server_alone(watched: Watched, event: Event) -> None:
    assert not watched.shows(event.expr, "nobody")


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
