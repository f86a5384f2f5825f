"""A cluster of containers survives crashes, scaling, and being stopped and started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from containers.project import Project, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
EPOCHS = 200
STEP_SECONDS = (
    1.0  # eight workers need ten minutes: however fast the machine, the run is not over before all of this has happened
)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    project = Project({"step_seconds": STEP_SECONDS, "checkpoint_interval": 2}, GEM_EPOCHS=str(EPOCHS))
    try:
        project.up(8)
        wait_until(lambda: project.version() > 50, project)
        yield project
    finally:
        project.down()


def leases(project: Project) -> int:
    return len(project.status().get("workers", []))


def goes_on(project: Project) -> None:
    """Commits are still being applied."""
    before = project.version()
    wait_until(lambda: project.version() > before + 20, project)


# The tests of this module follow one run from its start to its end.


def test_a_crashed_worker_comes_back_and_the_others_train_on(project: Project) -> None:
    project.crash("worker", index=3)
    goes_on(project)
    wait_until(lambda: max(one["RestartCount"] for one in project.containers("worker")) == 1, project)
    wait_until(lambda: leases(project) == 8, project)


def test_a_crashed_server_comes_back_from_its_checkpoint_and_the_workers_wait_for_it(project: Project) -> None:
    saved = wait_until(lambda: project.status().get("checkpoint_version"), project)
    run = project.status()["run_id"]
    project.crash("server")
    status = wait_until(project.status, project)
    assert status["run_id"] == run
    assert status["version"] >= saved
    assert project.containers("server")[0]["RestartCount"] == 1
    goes_on(project)
    assert all(state == "running" for state, _ in project.states("worker"))


def all_have_committed(project: Project, workers: int) -> bool:
    """Since the server started: so nobody is left who may still be told that its lease was rolled back."""
    commits = [worker["commits"] for worker in project.status().get("workers", [])]
    return len(commits) == workers and min(commits) > 0


def test_a_new_container_of_the_server_as_for_an_upgrade_loses_no_commit(project: Project) -> None:
    wait_until(lambda: all_have_committed(project, 8), project)
    before, status = project.containers("server")[0]["Id"], project.status()
    project.run("up", "--detach", "--no-deps", "--force-recreate", "server")
    assert project.containers("server")[0]["Id"] != before
    assert wait_until(project.status, project)["version"] >= status["version"]
    wait_until(lambda: all_have_committed(project, 8), project)
    assert project.status()["leases_ended"].get("rolled_back", 0) == status["leases_ended"].get("rolled_back", 0)


def test_scaling_up_adds_workers_in_mid_run(project: Project) -> None:
    project.scale(11)
    wait_until(lambda: leases(project) == 11, project)
    goes_on(project)


def test_scaling_down_lets_the_others_leave_in_order(project: Project) -> None:
    left = project.status()["leases_ended"].get("left", 0)
    project.scale(5)
    status = wait_until(lambda: (s := project.status()) and len(s["workers"]) == 5 and s, project)
    assert status["leases_ended"]["left"] == left + 6
    goes_on(project)


def test_stopping_everything_and_a_second_up_goes_on_where_it_was(project: Project) -> None:
    run = project.status()["run_id"]
    project.run("stop", "worker", "evaluator")
    version = project.version()
    project.run("stop")
    assert project.states("server") == [("exited", 0)]
    project.up(5)
    status = project.status()
    assert (status["run_id"], status["state"]) == (run, "RUN_STATE_TRAINING")
    assert status["version"] >= version > 0
    goes_on(project)


def test_after_all_that_every_sample_of_every_epoch_was_trained_on(project: Project) -> None:
    project.hurry()
    wait_until(lambda: project.states("worker") == [("exited", 0)] * 5, project, 400)
    version = project.version()
    status = project.evaluated(version)
    assert status["state"] == "RUN_STATE_COMPLETE"
    assert status["shards"]["samples_completed"] == EPOCHS * 1438
    assert status["evaluation"]["accuracy"] >= 0.95
