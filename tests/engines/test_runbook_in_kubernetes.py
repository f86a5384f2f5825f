"""The runbook's commands for Kubernetes name objects and values that the chart has."""

from __future__ import annotations

import re
import textwrap

import pytest
import yaml
from engines.chart import ROOT, schema_of
from engines.monitoring import render

kubernetes_validate = pytest.importorskip("kubernetes_validate")

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
RELEASE = render("ml", "digits")
CLAIM = RELEASE.one("StatefulSet")["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] + f"-{RELEASE.server_pod}"
# The first words of what the chart's values are called, and not an option of a program or the name of a file.
VALUES = sorted(set(re.findall(r"`?\b((?:server|worker|config|metrics|networkPolicy)(?:\.[a-zA-Z_]+)+)\b(?!\.md)", RUNBOOK)))


def test_the_names_of_objects_are_those_of_the_release_digits() -> None:
    named = set(re.findall(r"[\w-]*digits-gem[\w-]*", RUNBOOK))
    installed = {each["metadata"]["name"] for each in RELEASE.objects}
    assert {RELEASE.one("StatefulSet")["metadata"]["name"], RELEASE.server_pod, CLAIM} <= named
    assert named <= {*installed, RELEASE.server_pod, CLAIM}
    assert RELEASE.run == "ml/digits"
    assert f"{RELEASE.namespace}/{RELEASE.server_pod}" in RUNBOOK


@pytest.mark.parametrize("path", VALUES)
def test_every_value_is_one_of_the_chart(path: str) -> None:
    assert schema_of(path)


def test_values_are_found() -> None:
    assert {"config.learning_rate", "worker.parallelism"} <= set(VALUES)


def test_the_pod_that_moves_checkpoints_is_valid_and_mounts_the_servers_volume() -> None:
    (text,) = re.findall(r"kubectl apply -n ml -f - <<'END'\n(.*?)^    END$", RUNBOOK, re.DOTALL | re.MULTILINE)
    pod = yaml.safe_load(textwrap.dedent(text))
    kubernetes_validate.validate(pod, "1.37", strict=True)
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM
    server = RELEASE.one("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == server["containers"][0]["image"]
    assert pod["spec"]["securityContext"].items() <= server["securityContext"].items()
    (mount,) = container["volumeMounts"]
    assert mount in server["containers"][0]["volumeMounts"]
