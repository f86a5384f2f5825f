"""deploy/ray/rayjob.yaml: its pods are valid and restricted, and its entrypoint goes on with its run when the head was lost."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from engines.ray_cluster import OnRay, ray_cluster
from gem_worker.launcher.cli import main as train
from kit.pages import ROOT
from kit.settings import configured
from launcher.train_helpers import assert_every_sample_accounted_for, read_json

CLAIM, JOB = yaml.safe_load_all((ROOT / "deploy/ray/rayjob.yaml").read_text(encoding="utf-8"))
CLUSTER = JOB["spec"]["rayClusterSpec"]
EPOCHS = 12
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


@pytest.mark.parametrize("version", ["1.37", "1.33"])
def test_the_pods_and_the_volume_are_valid_and_the_pods_run_without_privileges(version: str) -> None:
    kubernetes_validate.validate(CLAIM, version, strict=True)
    for group in GROUPS:
        spec = group["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)
        assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 10001)
        for container in spec["containers"]:
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_entrypoint_is_a_run_on_ray_that_the_workers_pods_have_room_for(tmp_path: Path) -> None:
    arguments, run = entrypoint(tmp_path)
    options = train.make_context("gem-train", arguments).params
    (workers,) = CLUSTER["workerGroupSpecs"]
    cpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert options["resources"] == "CPU=1"
    assert workers["replicas"] * cpus >= options["workers"]
    spec = GROUPS[0]["template"]["spec"]
    (mount,), (volume,) = spec["containers"][0]["volumeMounts"], spec["volumes"]
    assert (mount["mountPath"], mount["name"]) == (run, volume["name"])
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def entrypoint(run: Path) -> tuple[list[str], str]:
    """The arguments of the entrypoint's gem-train, with this folder for the run; and the folder that they had."""
    command, *arguments = shlex.split(JOB["spec"]["entrypoint"])
    assert command == "gem-train"
    place = arguments.index("--resume") + 1
    return [*arguments[:place], str(run), *arguments[place + 1 :]], arguments[place]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_head_loses_no_commit(tmp_path: Path) -> None:
    """The driver, the server, Ray's own processes and the workers end at once. KubeRay then starts the same command on a new
    head."""
    run = tmp_path / "run"
    run.mkdir()
    arguments = [*entrypoint(run)[0], "--workers", "2", "--epochs", str(EPOCHS)]
    with on_a_new_head(tmp_path, arguments) as first:
        before = first.until_version(30)
        for pid in (*first.members(), first.process.pid):
            os.kill(pid, signal.SIGKILL)
    assert not (run / "summary.json").exists()
    with on_a_new_head(tmp_path, arguments) as second:
        assert second.wait() == 0, second.output
    assert read_json(run / "summary.json")["outcome"] == "complete"
    assert_every_sample_accounted_for(run, EPOCHS)
    began = re.findall(r" serving .* version=(\d+)", (run / "logs/server.log").read_text(encoding="utf-8"))
    assert (began[0], int(began[1]) >= before) == ("0", True), f"{before} commits were acknowledged, servers began at {began}"


@contextmanager
def on_a_new_head(folder: Path, arguments: list[str]) -> Iterator[OnRay]:
    """gem-train on a Ray cluster of one node. Nothing of both is left at the end."""
    with ray_cluster(3) as cluster:
        launched = OnRay(folder, *arguments, configured(ray_address=cluster.address))
        yield launched
        launched.close()
