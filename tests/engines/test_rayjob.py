"""deploy/ray/rayjob.yaml: its pods are valid and restricted, and its entrypoint is a command that gem-train accepts."""

from __future__ import annotations

import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml
from gem_worker.launcher.cli import main as train
from kit.pages import ROOT

JOB: dict[str, Any] = yaml.safe_load((ROOT / "deploy/ray/rayjob.yaml").read_text(encoding="utf-8"))
CLUSTER = JOB["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}


@pytest.mark.parametrize("group", GROUPS, ids=["head", "workers"])
@pytest.mark.parametrize("version", ["1.37", "1.35", "1.33"])
def test_the_pods_are_valid(group: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(pod(group), version, strict=True)


@pytest.mark.parametrize("group", GROUPS, ids=["head", "workers"])
def test_the_pods_run_without_privileges(group: dict[str, Any]) -> None:
    spec = group["template"]["spec"]
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 10001)
    for container in spec["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_entrypoint_is_a_run_on_ray_that_the_workers_pods_have_room_for() -> None:
    command, *arguments = shlex.split(JOB["spec"]["entrypoint"])
    assert command == "gem-train"
    options = train.make_context(command, arguments).params
    assert options["on"] == "ray"
    (workers,) = CLUSTER["workerGroupSpecs"]
    cpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert options["resources"] == "CPU=1"
    assert workers["replicas"] * cpus >= options["workers"]
    (mount,) = GROUPS[0]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(options["runs"]) == mount["mountPath"]
