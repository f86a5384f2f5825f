"""A real Prometheus scrapes a real server: the panels' queries have results, and the report shows them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from gem_api.process.http_port import serve_metrics
from gem_client import Admin, NonFiniteGradient, connect
from gem_ctl.cli import main
from gem_ctl.dashboards import DASHBOARDS
from gem_ctl.panels import Kind
from gem_ctl.prometheus import Prometheus, PrometheusError
from gem_ctl.range_panels import RANGES
from gem_ctl.report import fill_in, find_run
from gem_worker.process.metrics import WorkerMetrics
from kit.model import GRADIENT, SIZE, model
from kit.ports import free_address
from kit.server import DEADLINE, Live, config, serving, wait_until
from prometheus_client import CollectorRegistry

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
SCRAPE = 0.5  # seconds
WINDOW = 4 * SCRAPE
ODD = 'a "server" \\ [x].*+ <b>'  # what the server's instance is called
GONE = 'gem_run_info{run_id="gone",rule="gem"} 1\ngem_central_version 7\n'
ONE_SERVER = [board for board in DASHBOARDS if board is not RANGES]  # that one: tests/ctl/test_prometheus_ranges.py
QUERIES = {
    f"{board.uid}: {panel.title}, {number}": query.expr
    for board in ONE_SERVER
    for panel in board.panels
    for number, query in enumerate(panel.queries)
}
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@dataclass
class Watched:
    """A server in training, and the Prometheus that scrapes it.

    Attributes:
        live: The server.
        url: Prometheus's.
        began: Unix seconds.
    """

    live: Live
    url: str
    began: float

    @property
    def client(self) -> Prometheus:
        return Prometheus(self.url)

    def has(self, query: str) -> Callable[[], bool]:
        """Whether Prometheus has numbers for a query."""

        def look() -> bool:
            return any(np.isfinite(one.values).any() for one in self.client.range(query, self.began, time.time(), SCRAPE))

        return look

    def api(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}", timeout=DEADLINE) as answer:
            return json.load(answer)["data"]


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
    configuration = config(metrics_listen=metrics, checkpoint_dir=folder / "checkpoints", memory_limit=10**9)
    with serving(configuration) as live, training(live, WorkerMetrics(registry)), short_lived() as (gone, end):
        servers = [{"targets": [metrics], "labels": {"instance": ODD}}, {"targets": [gone], "labels": {"instance": "gone"}}]
        targets = {"gem-server": servers, "gem-worker": [{"targets": [worker]}]}
        with prometheus(folder, targets) as url:
            watch = Watched(live, url, began)
            wait_until(watch.has('gem_run_info{run_id="gone"}'), "the short-lived server to be scraped")
            end()
            yield watch


@contextmanager
def training(live: Live, metrics: WorkerMetrics) -> Iterator[None]:
    """Two workers that commit, one commit that is refused, an evaluation and a checkpoint."""
    with connect(live.address, name="bad") as session, Admin(live.address) as admin:
        session.join(model())
        session.commit(GRADIENT, loss=1.0, samples=8)
        with pytest.raises(NonFiniteGradient):
            session.commit(np.full(SIZE, np.nan, np.float32))
        admin.report_evaluation(1, 0.5, 0.75)
        admin.checkpoint()
    enough = threading.Event()

    def work(name: str) -> None:
        with connect(live.address, name=name) as session:
            session.join(model())
            for _ in metrics.timing("data", iter(lambda: enough.wait(0.02), True)):
                with metrics.phase("compute"):
                    metrics.trained(0.5, 0.1)
                with metrics.phase("exchange"):
                    session.commit(GRADIENT, loss=0.5, samples=8)

    crew = [threading.Thread(target=work, args=(name,), daemon=True) for name in ("ann", "bob")]
    for member in crew:
        member.start()
    try:
        yield
    finally:
        enough.set()
        for member in crew:
            member.join(DEADLINE)


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


@contextmanager
def prometheus(folder: Path, targets: dict[str, Any]) -> Iterator[str]:
    """Prometheus with the project's own configuration but for where its targets are and how often it asks them."""
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": f"{int(1000 * SCRAPE)}ms", "evaluation_interval": f"{int(1000 * SCRAPE)}ms"}
    settings["rule_files"] = [str(DEPLOY / name) for name in settings.get("rule_files", [])]
    names = [job["job_name"] for job in settings["scrape_configs"]]
    settings["scrape_configs"] = [{"job_name": name, "static_configs": targets[name]} for name in names]
    file, url = folder / "prometheus.yml", free_address()
    file.write_text(json.dumps(settings), encoding="utf-8")
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={url}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"http://{url}/-/ready", timeout=DEADLINE):
                return True
            return False

        wait_until(ready, "Prometheus to be ready")
        yield f"http://{url}"
    finally:
        process.kill()
        process.wait(DEADLINE)


# -- the panels


@pytest.mark.parametrize("where", QUERIES)
def test_every_query_of_every_panel_has_an_answer(watched: Watched, where: str) -> None:
    wait_until(watched.has(fill_in(QUERIES[where], ODD, WINDOW)), "data")


def test_a_query_is_about_the_chosen_server_alone(watched: Watched) -> None:
    wait_until(watched.has('gem_central_version{instance="gone"}'), "the other server to be scraped")
    chosen = watched.client.range(
        fill_in('gem_central_version{instance=~"$server"}', ODD, WINDOW), watched.began, time.time(), 1
    )
    assert {one.labels["instance"] for one in chosen} == {ODD}


def test_a_query_that_makes_no_sense_is_refused_with_prometheuss_own_words(watched: Watched) -> None:
    with pytest.raises(PrometheusError, match="parse error"):
        watched.client.range("sum(", watched.began, time.time(), 1)


def test_every_rule_of_the_alerts_can_be_evaluated(watched: Watched) -> None:
    def rules() -> list[Any]:
        return [rule for group in watched.api("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "the rules to be evaluated")
    assert [(rule["name"], rule.get("lastError")) for rule in rules() if rule["health"] != "ok"] == []
    assert any(rule["type"] == "alerting" for rule in rules())


# -- the report


def test_a_report_of_a_run_has_all_of_its_panels(watched: Watched, tmp_path: Path) -> None:
    expressions = [fill_in(query, ODD, WINDOW) for query in QUERIES.values()]
    wait_until(lambda: all(watched.has(expression)() for expression in expressions), "data for every panel")
    run_id = watched.live.core.run_id
    scrapes = f'sum(count_over_time(gem_run_info{{run_id="{run_id}"}}[1h]))'
    wait_until(lambda: (watched.client.value(scrapes, time.time()) or 0) >= 8, "some more scrapes")
    out = tmp_path / "run.html"
    result = CliRunner().invoke(main, ["report", str(out), "--prometheus", watched.url, "--run", run_id, "--last", "1"])
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert f"<h1>Run {run_id}</h1>" in text
    assert "server a &quot;server&quot; \\ [x].*+ &lt;b&gt;" in text
    drawn = [panel.title for board in ONE_SERVER for panel in board.panels if panel.kind is not Kind.NUMBER]
    assert [html.unescape(title) for title in re.findall("<h3>(.*?)</h3>", text)] == drawn
    assert text.count("<svg") == len(drawn)
    assert f"A point every {SCRAPE} s, rates over {WINDOW:g} s." in text
    tiles = {name: value for value, name in re.findall(r'<div class="tile"><b>([^<]+)</b>([^<]+)</div>', text)}
    assert tiles["accuracy"] == "75.00%"
    assert tiles["workers, at most"] in ("2", "3")
    assert 0 < int(tiles["commits"].replace(",", "")) <= watched.live.on_loop(lambda: watched.live.core.central.version)
    assert tiles.keys() >= {"training loss", "mean staleness", "mean π"}


@pytest.mark.parametrize("days", [0.01, 1, 30])
def test_a_run_that_was_short_is_found_however_far_one_looks_back(watched: Watched, days: float) -> None:
    """Prometheus drops a series at the first scrape that misses it, so a look every few minutes may pass a run over."""
    wait_until(lambda: watched.client.value('up{instance="gone"}', time.time()) == 0, "the short-lived server to be missed")
    now = time.time()
    run = find_run(watched.client, "gone", 86400 * days, now)
    assert (run.run_id, run.instance, run.settings) == ("gone", "gone", {"rule": "gem"})
    assert watched.began - 1 <= run.begin <= run.end <= now + 0.01  # Prometheus rounds to milliseconds


def test_the_metrics_of_a_run_that_is_over_need_no_server(watched: Watched, tmp_path: Path) -> None:
    out = tmp_path / "gone.html"
    result = CliRunner().invoke(main, ["report", str(out), "--prometheus", watched.url, "--run", "gone", "--last", "0.1"])
    assert result.exit_code == 0, result.output
    assert "<h1>Run gone</h1>" in out.read_text(encoding="utf-8")


# -- the configuration


@needs_promtool
def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    command = ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
