"""What the server's HTTP port serves: the live page, its data, the metrics, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_server.telemetry.health import Health
from gem_server.telemetry.live_page import MAX_WORKERS, LivePage
from kit.raw_client import SMALL, Wire, wired
from kit.server import DEADLINE, Live, config, serving, wait_until
from prometheus_client import CollectorRegistry, generate_latest
from telemetry.http_client import Response, ask_address

PATHS = ["/", "/status.json", "/metrics", "/healthz", "/readyz"]


def ask(live: Live, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Response:
    return ask_address(live.server.wiring.endpoint.http_address, path, method, headers)


def status(live: Live, ready: Callable[[Any], Any] = lambda _: True) -> Any:
    """The status, once it is as the test wants it: it may be half a second old."""

    def found() -> Any:
        response = ask(live, "/status.json")
        seen = response.json() if response.status == 200 else None
        return seen if seen and ready(seen) else None

    return wait_until(found, "the status that the test waits for")


@pytest.fixture
def paged(tmp_path: Path) -> Iterator[Live]:
    with serving(config(metrics_listen="127.0.0.1:0", history=tmp_path / "history.csv")) as live:
        yield live


def test_the_page_comes_with_headers_that_let_it_load_nothing_from_elsewhere(paged: Live) -> None:
    response = ask(paged, "/")
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), response.body, re.DOTALL)
        assert content is not None
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content[1]).digest()).decode()}'" in policy


def test_the_page_is_one_file_that_needs_nothing_else(paged: Live) -> None:
    page = ask(paged, "/").body.decode()
    links = re.findall(r"""(?:src|href|action)=["']?([^"' >]+)""", page)
    assert [link for link in links if not link.startswith(("data:", "/"))] == []
    assert set(re.findall(r"https?://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|@import|url\(", page)
    assert len(page.splitlines()) < 420


def test_the_table_of_workers_says_in_a_tooltip_what_a_column_is(paged: Live) -> None:
    """It names them as gem-ctl status and gem-train do."""
    heads = re.findall(r'<th scope="col"[^>]*?(?: title="([^"]+)")?>([^<]+)', ask(paged, "/").body.decode())
    names = [name for _, name in heads]
    assert names[:3] + names[5:8] == ["name", "commits", "staleness", "pace, s", "share", "waited, s"]
    assert [name for title, name in heads if not title] == ["name"]


def test_an_unknown_path_is_not_found_and_told_which_ones_exist(paged: Live) -> None:
    for path in ("/x", "/index.html", "/metrics/", "/../etc/passwd", "/%00", "/status.json/"):
        response = ask(paged, path)
        assert (response.status, response.body[:43]) == (404, b"the live page is at /, its data at /status.")
        assert response.headers["Content-Type"].startswith("text/plain")


def test_nothing_can_be_changed_here(paged: Live) -> None:
    for path, method in itertools.product(PATHS, ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]):
        response = ask(paged, path, method)
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD"), (path, method)


def test_head_is_get_without_its_body_and_a_query_changes_nothing(paged: Live) -> None:
    for path in (*PATHS, "/x"):
        got, head = ask(paged, path), ask(paged, path, "HEAD")
        assert (head.status, head.body, head.headers["Content-Type"]) == (got.status, b"", got.headers["Content-Type"])
        assert int(head.headers["Content-Length"]) > 0
    assert ask(paged, "/?a=<script>").body == ask(paged, "/").body


def test_metrics_are_byte_for_byte_what_prometheus_client_writes() -> None:
    registry = CollectorRegistry()
    started: list[Any] = []
    environ: Any = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": "text/plain"}
    body = b"".join(LivePage(registry, Health())(environ, lambda *line: started.extend(line)))  # type: ignore[arg-type]
    assert body == generate_latest(registry)
    assert started[0] == "200 OK"


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version=x.y.z"])
def test_a_malformed_accept_header_is_refused(accept: str, paged: Live, capfd: pytest.CaptureFixture[str]) -> None:
    response = ask(paged, "/metrics", headers={"Accept": accept})
    assert (response.status, response.body) == (400, b"the Accept header is malformed\n")
    assert "Traceback" not in capfd.readouterr().err


def test_the_status_is_that_of_gem_ctl_with_the_curves(paged: Live) -> None:
    with wired(paged) as wire:
        worker, other = wire.started("worker"), wire.join("other")
        other.pull()
        for _ in range(3):
            worker.took(wire.whole("Commit", worker.header(loss=0.5), *worker.body()).answer(SMALL.size))
        wire.call("ReportEvaluation", pb.ReportEvaluationRequest(version=3, loss=0.25, accuracy=0.75))
        seen = status(paged, lambda seen: 0.75 in seen["curves"]["accuracy"])
    assert seen["version"] == 3
    assert seen["training_loss"] == 0.5
    assert [worker["name"] for worker in seen["workers"]] == ["worker", "other"]
    assert (seen["worker_count"], seen["lease_seconds"], seen["learning_rate"]) == (2, 60.0, 0.05)
    assert (seen["begin_version"], seen["start_version"], seen["nonfinite_losses"]) == (0, 0, 0)
    curves = seen["curves"]
    assert set(curves) == {field.name for field in pb.RunCurves.DESCRIPTOR.fields}
    assert len({len(column) for column in curves.values()}) == 1
    assert (curves["version"][-1], curves["loss"][-1], curves["workers"][-1]) == (3, 0.5, 2)
    assert 0.25 in curves["evaluation_loss"]


def test_nan_and_infinity_become_null(paged: Live) -> None:
    with wired(paged) as wire:
        worker = wire.started("worker")
        for loss in (math.nan, math.inf):
            worker.took(wire.whole("Commit", worker.header(loss=loss), *worker.body()).answer(SMALL.size))
        wire.call("ReportEvaluation", pb.ReportEvaluationRequest(version=2, loss=math.nan, accuracy=0.5))
        seen = status(paged, lambda seen: seen["nonfinite_losses"] == 2)
    assert seen["training_loss"] is None
    assert seen["workers"][0]["loss"] is None
    assert seen["evaluation"]["loss"] is None


def test_the_learning_rate_follows_its_schedule() -> None:
    settings = Hyperparameters(learning_rate=0.4, warmup_versions=4)
    with serving(config(settings, metrics_listen="127.0.0.1:0")) as live, wired(live) as wire:
        wire.started("worker").commit()
        assert status(live, lambda seen: seen["version"] == 1)["learning_rate"] == pytest.approx(0.2)
    with serving(config(Hyperparameters(optimizer="worker"), metrics_listen="127.0.0.1:0")) as live:
        assert status(live)["learning_rate"] is None


def test_a_thousand_workers_do_not_make_a_thousand_rows(paged: Live) -> None:
    with wired(paged) as wire:
        _join_many(wire, MAX_WORKERS + 20)
        seen = status(paged, lambda seen: seen["worker_count"] == MAX_WORKERS + 20)
    assert len(seen["workers"]) == MAX_WORKERS


def _join_many(wire: Wire, count: int) -> None:
    for number in range(count):
        wire.join(f"worker-{number}")


def test_many_readers_cost_the_server_one_status() -> None:
    """A reader cannot make the event loop work more often than twice a second."""
    taken: list[float] = []
    now = [100.0]
    page = LivePage(CollectorRegistry(), Health(), lambda: now[0])
    page._read = lambda: taken.append(now[0]) or b"{}"  # type: ignore[func-returns-value]
    environ: Any = {"REQUEST_METHOD": "GET", "PATH_INFO": "/status.json"}
    for tenth in range(1000):
        now[0] = 100 + tenth / 100
        assert list(page(environ, lambda *_: None)) == [b"{}"]  # type: ignore[arg-type]
    assert len(taken) == 20


@pytest.mark.long
def test_a_busy_event_loop_gives_a_503_and_is_not_asked_again_at_once(paged: Live) -> None:
    release = threading.Event()
    status(paged)
    blocked = threading.Thread(target=paged.on_loop, args=(lambda: release.wait(DEADLINE),))
    blocked.start()
    try:
        response = wait_until(lambda: _not_ok(ask(paged, "/status.json")), "a status that does not come")
        assert response.status == 503
        assert "busy" in response.json()["error"]
        assert ask(paged, "/").status == ask(paged, "/metrics").status == 200
    finally:
        release.set()
        blocked.join()
    status(paged)


def _not_ok(response: Response) -> Response | None:
    return response if response.status != 200 else None


def test_before_the_run_is_there_the_page_is_and_its_status_says_so() -> None:
    page, started = LivePage(CollectorRegistry(), Health()), []
    for path, expected in (("/", "200 OK"), ("/status.json", "503 Service Unavailable")):
        environ: Any = {"REQUEST_METHOD": "GET", "PATH_INFO": path}
        page(environ, lambda line, headers: started.append(line))  # type: ignore[arg-type]
        assert started[-1] == expected


def test_a_resumed_server_shows_the_earlier_curve_from_its_history(tmp_path: Path) -> None:
    settings = {"metrics_listen": "127.0.0.1:0", "checkpoint_dir": tmp_path / "c", "history": tmp_path / "history.csv"}
    with serving(config(**settings)) as live, wired(live) as wire:  # type: ignore[arg-type]
        worker = wire.started("worker")
        for _ in range(5):
            worker.took(wire.whole("Commit", worker.header(loss=0.5), *worker.body()).answer(SMALL.size))
    with serving(config(resume=True, **settings)) as live:  # type: ignore[arg-type]
        seen = status(live)
        assert (seen["begin_version"], seen["start_version"]) == (0, 5)
        assert (seen["curves"]["version"][-1], seen["curves"]["loss"][-1]) == (5, 0.5)
    del settings["history"]
    with serving(config(resume=True, **settings)) as live:  # type: ignore[arg-type]
        assert (status(live)["begin_version"], status(live)["start_version"]) == (5, 5)
