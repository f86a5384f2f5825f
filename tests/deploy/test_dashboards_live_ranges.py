"""A real Prometheus scrapes the real servers of two ranges: what all of them count is shown once, and each has its own line."""

from __future__ import annotations

import shutil
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
from gem_client import Session
from gem_dashboards.boards import DASHBOARDS
from gem_dashboards.panels import Panel
from gem_dashboards.queries import SAME_RUN
from gem_dashboards.range_board import RANGES
from kit.crew import beginning, crew
from kit.prometheus import SCRAPE, Prometheus, Series, fill_in, watching
from kit.server import DEADLINE, Live, wait_until

pytestmark = pytest.mark.long
WINDOW = 4 * SCRAPE
SETTINGS = Hyperparameters(reply_wait=0.15)
PANELS = {f"{board.uid}: {panel.title}": panel for board in DASHBOARDS for panel in board.panels}


@dataclass
class Watched:
    """The servers of two ranges in training, and the Prometheus that scrapes them and another server."""

    run: Ranges
    client: Prometheus
    began: float

    @property
    def leader(self) -> str:
        return instance(self.run.lives[0])

    def series(self, expression: str) -> list[Series]:
        query = fill_in(expression, self.leader, WINDOW)
        return [one for one in self.client.range(query, self.began, time.time(), SCRAPE) if np.isfinite(one.values).any()]

    def panel(self, where: str) -> list[list[Series]]:
        """The series of each query of a panel, once all have some."""
        panel = PANELS[where]
        wait_until(lambda: all(self.series(query.expr) for query in panel.queries), f"data for {where}", DEADLINE)
        return [self.series(query.expr) for query in panel.queries]


def instance(live: Live) -> str:
    address: str = live.server.wiring.endpoint.http_address
    return address


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder, began = tmp_path_factory.mktemp("prometheus"), time.time()
    metrics: dict[str, Any] = {"metrics_listen": "127.0.0.1:0", "memory_limit": 10**9, "settings": SETTINGS}
    with ranges(folder / "run", 2, **metrics) as run, training(run), ranges(folder / "other", 1, **metrics) as other:
        targets = {"gem-server": [{"targets": [*map(instance, run.lives), instance(other.lives[0])]}], "gem-worker": []}
        with watching(folder, targets) as client:
            yield Watched(run, client, began)


@contextmanager
def training(run: Ranges) -> Iterator[None]:
    """Two workers that commit; another has sent a gradient that range 1 alone rejects."""

    def work(session: Session, enough: threading.Event) -> None:
        while not enough.wait(0.05):
            session.commit(GRADIENT, loss=0.5, samples=8)

    partly = GRADIENT.copy()
    partly[-1] = np.nan
    beginning(run.address, large_model(), GRADIENT, partly)
    with crew(run.address, large_model(), work):
        yield


def is_of_servers(panel: Panel) -> bool:
    return not any(SAME_RUN in query.expr for query in panel.queries)


def test_every_panel_about_servers_has_data(watched: Watched) -> None:
    for where, panel in PANELS.items():
        if is_of_servers(panel):
            assert watched.panel(where), where
            for query in panel.queries:
                of_nobody = watched.client.range(fill_in(query.expr, "nobody", WINDOW), watched.began, time.time(), SCRAPE)
                assert not any(np.nan_to_num(one.values).any() for one in of_nobody), where


@pytest.mark.parametrize(
    "panel", [panel for panel in RANGES.panels if "{{range}}" in panel.queries[0].legend], ids=lambda panel: panel.title
)
def test_each_range_has_a_line(watched: Watched, panel: Panel) -> None:
    (lines,) = watched.panel(f"{RANGES.uid}: {panel.title}")
    expected = {"1"} if "Rejected" in panel.title else {"0", "1"}
    assert {line.labels["range"] for line in lines} == expected


def newest(lines: list[Series]) -> float:
    (line,) = lines
    return float(line.values[np.isfinite(line.values)][-1])


def test_what_both_servers_count_is_counted_once(watched: Watched) -> None:
    wait_until(lambda: newest(watched.panel("gem-training: Active workers")[0]) == 2, "two workers")
    (commits,) = watched.panel("gem-training: Commits")
    assert newest(commits) <= watched.run.lives[0].on_loop(lambda: watched.run.lives[0].core.central.version)
    rates = watched.client.values('sum by (range) (rate(gem_commits_total{outcome="applied", range!=""}[1m]))', time.time())
    (rate,) = watched.panel("gem-training: Commits per second")
    assert newest(rate) == pytest.approx(np.mean([one.values[0] for one in rates]), rel=0.5)


def test_memory_is_the_sum_and_no_range_is_missing(watched: Watched) -> None:
    held, limit, _ = watched.panel("gem-server: Memory for the model and the workers")
    assert newest(limit) == 2 * 10**9
    one = watched.run.lives[0].on_loop(lambda: watched.run.lives[0].core.memory.held)
    assert newest(held) > 1.5 * one
    wait_until(lambda: newest(watched.panel("gem-ranges: Ranges missing")[0]) == 0, "both ranges")
    assert newest(watched.panel("gem-server: Server answers")[0]) == 1
