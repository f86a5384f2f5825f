"""What users add to the chart's objects: to pods, containers, claims and labels, and objects of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from engines.chart import Object, environment, found, named, objects, pod_specs, schema_of, values_of

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


def pod_of(component: str, **part: Any) -> Object:
    """The pod's template of a part of a release with these values."""
    kind = {"server": "StatefulSet", "worker": "Job", "evaluator": "Deployment"}[component]
    template: Object = found(objects({component: part}), kind, component)["spec"]["template"]
    return template


@pytest.mark.parametrize("component", ["server", "worker", "evaluator"])
def test_fields_of_a_pod_are_added_or_replaced(component: str) -> None:
    before = pod_of(component)
    pod: Object = {
        "labels": {"tier": "training"},
        "annotations": {"note": "x"},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "50Gi"}}, {"name": "more", "emptyDir": {}}],
        "securityContext": {"runAsNonRoot": False, "supplementalGroups": [7]},
    }
    container: Object = {
        "env": [{"name": "MORE", "value": "1"}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}, {"name": "tmp", "mountPath": "/scratch"}],
        "securityContext": {"readOnlyRootFilesystem": False, "capabilities": {"drop": ["NET_RAW"]}},
    }
    after = pod_of(component, pod=pod, container=container)
    assert after["metadata"]["labels"] == before["metadata"]["labels"] | {"tier": "training"}
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"] | {"note": "x"}
    spec, was = after["spec"], before["spec"]
    assert spec["topologySpreadConstraints"] == pod["topologySpreadConstraints"]
    assert spec["volumes"] == [each for each in was["volumes"] if each["name"] != "tmp"] + pod["volumes"]
    assert spec["securityContext"] == was["securityContext"] | pod["securityContext"], "false replaces true"
    (one,), (other,) = spec["containers"], was["containers"]
    assert one["env"] == other["env"] + container["env"]
    assert one["volumeMounts"] == other["volumeMounts"] + container["volumeMounts"]
    assert one["securityContext"] == other["securityContext"] | container["securityContext"], "words are replaced, not joined"
    unchanged = set(was) - {"topologySpreadConstraints", "volumes", "securityContext", "containers"}
    assert {name: spec[name] for name in unchanged} == {name: was[name] for name in unchanged}


def test_an_init_container_comes_after_the_charts_and_terms_of_affinity_join() -> None:
    term = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {}}}
    mine: Object = {"initContainers": [{"name": "sidecar", "image": "x", "restartPolicy": "Always"}]}
    mine["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}, "nodeAffinity": {}}
    spec = pod_of("server", ranges=2, pod=mine)["spec"]
    assert [each["name"] for each in spec["initContainers"]] == ["compiled", "sidecar"]
    assert len(spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]) == 2


def test_an_empty_list_takes_nothing_away() -> None:
    assert pod_of("worker", pod={"volumes": []}) == pod_of("worker")


def test_common_labels_are_on_everything_but_what_an_upgrade_cannot_change() -> None:
    of = objects(values_of("full") | {"commonLabels": {"cost-centre": "7"}})
    pods = [each["spec"]["template"] for each in of if "template" in each.get("spec", {})]
    assert len(pods) == 3
    for each in (*of, *pods):
        assert each["metadata"]["labels"]["cost-centre"] == "7"
    stateful = found(of, "StatefulSet")["spec"]
    selectors = [each["spec"]["selector"] for each in of if each["kind"] in ("StatefulSet", "Deployment", "Service")]
    assert "cost-centre" not in json.dumps([stateful["volumeClaimTemplates"], selectors])


def test_parts_have_accounts_of_their_own() -> None:
    values: Object = {
        "server": {"serviceAccount": {"name": "there-already"}},
        "worker": {"serviceAccount": {"annotations": {"role": "reader"}}},
        "evaluator": {"enabled": False},
    }
    of = objects(values)
    assert {each["serviceAccountName"] for each in pod_specs(of).values()} == {"there-already", "demo-gem-worker"}
    account = found(of, "ServiceAccount")
    assert (account["metadata"]["annotations"], account["automountServiceAccountToken"]) == ({"role": "reader"}, False)
    assert len({each["serviceAccountName"] for each in pod_specs(objects()).values()}) == 3


def test_a_claim_takes_what_kubernetes_has_for_it() -> None:
    snapshot = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "yesterday"}
    claim = {"accessModes": ["ReadWriteOncePod"], "dataSource": snapshot}
    stateful = found(objects({"server": {"persistence": {"claim": claim, "whenDeleted": "Delete"}}}), "StatefulSet")["spec"]
    assert stateful["volumeClaimTemplates"][0]["spec"] == {"resources": {"requests": {"storage": "10Gi"}}, **claim}
    assert stateful["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}


def test_an_image_is_named_by_its_digest() -> None:
    digest = "sha256:" + "0a" * 32
    values = {"image": {"registry": "registry.example.com/ml"}, "server": {"image": {"digest": digest, "tag": "7"}}}
    (container,) = pod_specs(objects(values))["StatefulSet demo-gem-server"]["containers"]
    assert container["image"] == f"registry.example.com/ml/gem-server@{digest}"


def test_objects_of_ones_own_use_the_charts_names_and_get_its_labels() -> None:
    backend = {"name": '{{ include "gem.fullname" . }}', "port": 9464}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "page", "labels": {"own": "yes"}},
        "spec": {"parentRefs": [{"name": "public"}], "rules": [{"backendRefs": [backend]}]},
    }  # fmt: skip
    made = named(objects({"extraObjects": [route]}), "HTTPRoute", "page")
    assert made["spec"]["rules"] == [{"backendRefs": [{"name": "demo-gem", "port": 9464}]}]
    assert (made["metadata"]["labels"]["own"], made["metadata"]["labels"]["app.kubernetes.io/instance"]) == ("yes", "demo")


def test_ports_are_open_on_ipv4_and_ipv6() -> None:
    """tests/lane/test_listener.py and tests/telemetry/test_http_port.py show that [::] is both."""
    listening = {
        name: value
        for spec in pod_specs(objects()).values()
        for name, value in environment(spec["containers"][0]).items()
        if name.endswith("LISTEN")
    }
    assert set(listening) == {"GEM_LISTEN", "GEM_LANE_LISTEN", "GEM_METRICS_LISTEN", "GEM_WORKER_METRICS_LISTEN"}
    assert all(value.startswith("[::]:") for value in listening.values()), listening
