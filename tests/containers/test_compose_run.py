"""`docker compose up --scale worker=8` as a user types it: real containers, a real Prometheus."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import yaml
from containers.project import ROOT, Project, wait_until
from gem_dashboards.boards import DASHBOARDS
from gem_dashboards.range_board import RANGES
from kit.prometheus import fill_in

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
WORKERS = 8


class Run:
    """The cluster after its run, and when it began."""

    def __init__(self) -> None:
        self.project = Project({"epochs": 120, "step_seconds": 0.05, "checkpoint_interval": 5})
        self.began = time.time()
        self.targets: list[dict[str, str]] = []

    def live_targets(self) -> list[tuple[str, str]]:
        """(job, instance) of what Prometheus reaches."""
        targets = self.project.prometheus("targets", state="active")["activeTargets"]
        return [(one["labels"]["job"], one["labels"]["instance"]) for one in targets if one["health"] == "up"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    run = Run()
    try:
        run.project.up(WORKERS)
        yield run
    finally:
        run.project.down()


# The tests of this module follow one run from its start to its end.


def test_prometheus_finds_the_server_and_every_worker(run: Run) -> None:
    targets = wait_until(lambda: len(found := run.live_targets()) == 1 + WORKERS and found, run.project)
    assert targets.count(("gem-server", "server:9464")) == 1
    assert len({instance for job, instance in targets if job == "gem-worker"}) == WORKERS


def test_the_containers_run_without_rights_and_the_servers_image_has_no_torch(run: Run) -> None:
    for service in ("server", "worker"):
        assert run.project.shell(service, "id", "-u").strip() == "10001"
        assert run.project.shell(service, "sh", "-c", "touch /touched || echo read-only").strip() == "read-only"
    assert "No module named 'torch'" in run.project.shell(
        "server", "python3", "-c", "try:\n import torch\nexcept ImportError as error: print(error)"
    )


def test_the_workers_train_to_the_end_and_exit_with_status_0(run: Run) -> None:
    wait_until(lambda: run.project.states("worker") == [("exited", 0)] * WORKERS, run.project, 400)
    status = run.project.status()
    assert status["state"] == "RUN_STATE_COMPLETE"
    shards = status["shards"]
    assert (shards["pending"], shards["leased"], shards["epoch"] + 1) == (0, 0, shards["epochs"])
    assert shards["samples_completed"] == shards["epochs"] * 1438


def test_training_began_once_all_workers_had_joined_and_each_made_commits(run: Run) -> None:
    begins = [line for line in run.project.run("logs", "--no-color", "server").splitlines() if "training begins" in line]
    assert [re.findall(r"workers=(\d+)", line) for line in begins] == [[str(WORKERS)]]
    counts = re.findall(r" commits=(\d+)", run.project.run("logs", "--no-color", "worker"))
    assert len(counts) == WORKERS
    assert min(map(int, counts)) > 0


def test_no_tensor_went_through_a_socket(run: Run) -> None:
    """Every worker found the server's memory through the volume that they share."""
    done = [line for line in run.project.run("logs", "--no-color", "worker").splitlines() if "commits=" in line]
    assert len(done) == WORKERS
    assert all("shared_memory=True" in line for line in done), done


def test_the_server_stays_and_has_saved_and_evaluated_the_result(run: Run) -> None:
    assert run.project.evaluated(run.project.version())["evaluation"]["accuracy"] >= 0.95
    assert run.project.states("server") == [("running", 0)]
    wait_until(lambda: (s := run.project.status())["checkpoint_version"] == s["version"], run.project)


def test_every_query_of_every_dashboard_evaluates_and_every_panel_has_data(run: Run) -> None:
    empty = []
    for board in DASHBOARDS:
        for panel in board.panels:
            answers = []
            for query in panel.queries:
                expr = fill_in(query.expr, "server:9464", 20)
                answer = run.project.prometheus("query_range", query=expr, start=str(run.began), end=str(time.time()), step="5")
                answers += answer["result"]
            values = {value for series in answers for _, value in series["values"]}
            if not values - {"NaN"}:
                empty.append((board, panel))
    of_ranges = [(RANGES, panel) for panel in RANGES.panels]  # this server holds everything
    others = [f"{board.title}: {panel.title}" for board, panel in empty if (board, panel) not in of_ranges]
    failed = "GEM / Server: Calls that failed, by method and error"  # one may have, before there was a model
    # No reply is held in this run, and the workers share memory.
    usual = ["GEM / Server: Time that replies are held", "GEM / Server: Time on the network"]
    assert [each for each in others if each != failed] == usual
    assert [panel for board, panel in empty if board is RANGES] == list(RANGES.panels)


def test_every_alert_evaluates_and_a_healthy_run_sets_none_off(run: Run) -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    written = {rule.get("alert", rule.get("record")) for group in groups for rule in group["rules"]}
    rules = [rule for group in run.project.prometheus("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == written
    assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(written, "ok")
    fired = run.project.prometheus(
        "query_range", query='ALERTS{alertstate="firing"}', start=str(run.began), end=str(time.time()), step="5"
    )
    assert [series["metric"]["alertname"] for series in fired["result"]] == []


def test_a_second_up_of_a_finished_run_changes_nothing(run: Run) -> None:
    version = run.project.version()
    run.project.run("stop")
    run.project.up(WORKERS)
    wait_until(lambda: run.project.states("worker") == [("exited", 0)] * WORKERS, run.project)
    status = run.project.status()
    assert (status["version"], status["state"]) == (version, "RUN_STATE_COMPLETE")
