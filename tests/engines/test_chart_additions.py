"""What users add to the chart's objects: to pods, containers, claims and labels, and objects of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from engines.chart import Object, found, objects, pod_of, schema_of, values_of
from gem_api import __version__

STRICT = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
# What the chart decides, has values of its own for, or would be wrong here.
OF_THE_CHART = {
    "pod": {
        "automountServiceAccountToken", "containers", "enableServiceLinks", "ephemeralContainers", "evictionResponders",
        "hostIPC", "hostPID", "restartPolicy", "schedulingGroup", "serviceAccount", "serviceAccountName",
        "terminationGracePeriodSeconds",
    },
    "container": {
        "args", "command", "image", "name", "resources", "restartPolicy", "stdinOnce", "terminationMessagePath",
        "terminationMessagePolicy",
    },
}  # fmt: skip


@pytest.mark.parametrize(("part", "file"), [("pod", "podspec-v1"), ("container", "container-v1")])
def test_the_schema_has_every_field_of_kubernetes_but_the_charts(part: str, file: str) -> None:
    theirs = json.loads((STRICT / f"{file}.json").read_text(encoding="utf-8"))["properties"]
    ours = schema_of(f"worker.{part}")["properties"].keys() - {"labels", "annotations"}
    assert theirs.keys() - ours == OF_THE_CHART[part]
    assert ours <= theirs.keys()
    for name in ours:
        assert schema_of(f"worker.{part}.{name}")["type"] in theirs[name].get("type", ["object"]), name


def spec_of(**worker: Any) -> Object:
    """The worker's pod with these values. All parts have the same template: the golden files show it."""
    spec: Object = pod_of(found(objects({"worker": worker}), "Job"))["spec"]
    return spec


def test_fields_are_replaced_maps_are_merged_and_lists_of_objects_are_joined() -> None:
    pod: Object = {"securityContext": {"runAsNonRoot": False, "supplementalGroups": [7]}, "volumes": []}
    container: Object = {"securityContext": {"capabilities": {"drop": ["NET_RAW"]}}}
    was, spec = spec_of(), spec_of(pod=pod, container=container)
    (one,), (other,) = spec.pop("containers"), was.pop("containers")
    assert spec == was | {"securityContext": was["securityContext"] | pod["securityContext"]}, (
        "an empty list takes nothing away"
    )
    assert one == other | {"securityContext": other["securityContext"] | container["securityContext"]}, "words are not joined"


def test_an_init_container_comes_after_the_charts_and_terms_of_affinity_join() -> None:
    term = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {}}}
    mine: Object = {"initContainers": [{"name": "sidecar", "image": "x", "restartPolicy": "Always"}]}
    mine["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}, "nodeAffinity": {}}
    spec = pod_of(found(objects({"server": {"ranges": 2, "pod": mine}}), "StatefulSet"))["spec"]
    assert [each["name"] for each in spec["initContainers"]] == ["compiled", "sidecar"]
    assert len(spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]) == 2


def test_common_labels_are_on_everything_but_what_an_upgrade_cannot_change() -> None:
    of = objects(values_of("full") | {"commonLabels": {"cost-centre": "7"}})
    pods = [each["spec"]["template"] for each in of if "template" in each.get("spec", {})]
    assert len(pods) == 3
    for each in (*of, *pods):
        assert each["metadata"]["labels"]["cost-centre"] == "7"
    stateful = found(of, "StatefulSet")["spec"]
    selectors = [each["spec"]["selector"] for each in of if each["kind"] in ("StatefulSet", "Deployment", "Service")]
    fixed = json.dumps([stateful["volumeClaimTemplates"], selectors])
    assert not {"cost-centre", __version__} & set(re.findall(r"[\w.-]+", fixed)), "an upgrade changes the version"
