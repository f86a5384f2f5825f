"""The example of a custom worker image, built and run as its README says."""

from __future__ import annotations

import subprocess

import pytest
from containers.project import ROOT, Project, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
IMAGE = "gem-test-sine-worker"


def test_an_image_with_one_module_more_trains_its_own_task() -> None:
    subprocess.run(["docker", "build", "--quiet", "--tag", IMAGE, "deploy/custom-worker"], cwd=ROOT, check=True, timeout=300)
    project = Project(GEM_WORKER_IMAGE=IMAGE, GEM_TASK="sine:Sine", GEM_EPOCHS="100")
    try:
        project.up(2)
        wait_until(lambda: project.states("worker") == [("exited", 0)] * 2, project)
        version = project.version()
        status = project.evaluated(version)
        assert status["shards"]["samples_completed"] == 100 * 2048
        assert status["evaluation"]["loss"] < 0.05
        assert status["evaluation"]["accuracy"] is None
    finally:
        project.down()
