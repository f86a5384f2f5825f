"""Renders the Helm chart with Helm's own library, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "gem"
CI = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "demo", "ml"
# The values that turn on everything for Prometheus and Grafana.
METRICS = {"metrics": {kind: {"enabled": True} for kind in ("serviceMonitor", "prometheusRule", "dashboards")}}
WITH_PODS = ("StatefulSet", "Deployment", "Job", "CronJob", "Pod")

Object = dict[str, Any]


def values_of(name: str) -> Object:
    """The values of ci/NAME-values.yaml; of the defaults for ""."""
    text = (CHART / "ci" / f"{name}-values.yaml").read_text(encoding="utf-8") if name else "{}"
    values: Object = helm_python.values_from_yaml(text)
    return values


def rendered(values: Object | None = None, release: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """What Helm makes of the chart: the text of each template, by its path under templates/. Raises HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values=values or {}, name=release, namespace=namespace)
    return {path.partition("templates/")[2]: text for path, text in texts.items()}


def objects(values: Object | None = None, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """All objects of the release."""
    texts = (text for path, text in rendered(values, release, namespace).items() if path.endswith(".yaml"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def found(of: list[Object], kind: str, component: str = "") -> Object:
    """The only object of a kind, and with a component if there are several. Fails if there is not exactly one."""
    label = "app.kubernetes.io/component"
    matching = [each for each in of if each["kind"] == kind and component in ("", each["metadata"]["labels"].get(label))]
    assert len(matching) == 1, f"{len(matching)} objects of kind {kind} {component}"
    return matching[0]


def named(of: list[Object], kind: str, name: str) -> Object:
    """The object of a kind with this name."""
    (only,) = [each for each in of if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return only


def pod_specs(of: list[Object]) -> dict[str, Object]:
    """The specs of all pods, by kind and name of what they belong to."""
    return {f"{each['kind']} {each['metadata']['name']}": pod_of(each)["spec"] for each in of if each["kind"] in WITH_PODS}


def pod_of(owner: Object) -> Object:
    """The template of the pods that an object makes; of a pod, itself."""
    spec = owner.get("spec", {})
    pod: Object = spec.get("jobTemplate", {}).get("spec", spec).get("template", owner)
    return pod


def environment(container: Object) -> dict[str, str]:
    """The variables of a container that have a value of their own."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def schema_of(path: str) -> Object:
    """The part of values.schema.json for a value. Raises KeyError if there is no such value."""
    whole: Object = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    part = whole
    for name in filter(None, path.split(".")):
        known = part.get("properties", {})
        part = known[name] if name in known else part["additionalProperties"]  # of a map of Kubernetes, any name
        part = referred(whole, part)
    return part


def referred(whole: Object, part: Any) -> Any:
    """A part of a schema, or the definition that it refers to."""
    return whole["definitions"][part["$ref"].rpartition("/")[2]] if isinstance(part, dict) and "$ref" in part else part
