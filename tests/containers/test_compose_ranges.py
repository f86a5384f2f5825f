"""Two servers, each with half of the model, in containers: each is killed once, and the run completes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from containers.project import Project, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
WORKERS, EPOCHS = 3, 100
SERVERS = ("server", "server-1")


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    files = "docker-compose.yml:deploy/compose.ranges.yml"
    project = Project({"step_seconds": 0.5, "checkpoint_interval": 5}, COMPOSE_FILE=files, GEM_EPOCHS=str(EPOCHS))
    try:
        project.up(WORKERS)
        wait_until(lambda: project.version() > 50, project)
        yield project
    finally:
        project.down()


def versions(project: Project) -> list[int]:
    return [int(project.status(service).get("version", 0)) for service in SERVERS]


def crashes_and_comes_back(project: Project, service: str) -> None:
    """Kills a server with SIGKILL; it resumes the run without losing a commit, and the workers train on."""
    before = project.status(service)
    project.crash(service)
    after = wait_until(lambda: project.status(service), project)
    assert after["run_id"] == before["run_id"]
    assert after["version"] >= before["version"]
    assert project.containers(service)[0]["RestartCount"] == 1
    wait_until(lambda: min(versions(project)) > after["version"] + 20, project)
    assert all(state == "running" for state, _ in project.states("worker"))


# The tests of this module follow one run from its start to its end.


def test_the_two_servers_hold_one_run_and_prometheus_scrapes_both(project: Project) -> None:
    wait_until(lambda: all(len(project.status(service)["workers"]) == WORKERS for service in SERVERS), project)
    leader, other = (project.status(service) for service in SERVERS)
    assert leader["run_id"] == other["run_id"]
    assert [each.get("range_index", 0) for each in (leader, other)] == [0, 1]
    assert [each["range_count"] for each in (leader, other)] == [2, 2]
    assert leader["peers"] == ["server-1:50051"]

    def up() -> set[str]:
        targets = project.prometheus("targets", state="active")["activeTargets"]
        return {each["labels"]["instance"] for each in targets if each["health"] == "up"}

    wait_until(lambda: up() >= {f"{service}:9464" for service in SERVERS}, project)


def test_a_killed_server_that_does_not_lead_comes_back(project: Project) -> None:
    crashes_and_comes_back(project, "server-1")


def test_a_killed_leader_comes_back(project: Project) -> None:
    crashes_and_comes_back(project, "server")


def test_the_run_completes_and_both_servers_have_applied_every_commit(project: Project) -> None:
    project.hurry()
    wait_until(lambda: project.states("worker") == [("exited", 0)] * WORKERS, project, 400)
    leader, other = versions(project)
    assert leader == other
    done = project.evaluated(leader)
    assert done["state"] == "RUN_STATE_COMPLETE"
    assert done["shards"]["samples_completed"] == EPOCHS * 1438
    assert done["evaluation"]["accuracy"] >= 0.95
    last = [line for line in project.run("logs", "--no-color", "worker").splitlines() if "commits=" in line]
    assert [line for line in last if "shared_memory=True" not in line] == [], "each server has a socket of its own"
