"""What becomes of the chart's monitors: Helm renders them, and the Prometheus operator makes a configuration of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engines.chart import objects

NOWHERE = "127.0.0.1:1"  # where nothing listens: the address of targets that are not to be scraped


@dataclass(frozen=True)
class Release:
    """An installed chart, and the objects that Helm renders for it."""

    namespace: str
    name: str
    objects: tuple[dict[str, Any], ...]

    @property
    def run(self) -> str:
        return f"{self.namespace}/{self.name}"

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = self.all(kind)
        return found

    @property
    def server_pod(self) -> str:
        return str(self.one("StatefulSet")["metadata"]["name"]) + "-0"


def render(namespace: str, name: str) -> Release:
    """The release with all of its metrics on."""
    values = {kind: {"enabled": True} for kind in ("serviceMonitor", "prometheusRule", "dashboards")}
    return Release(namespace, name, tuple(objects({"metrics": values}, name, namespace)))


# -- what Kubernetes' service discovery gives


def _labels(kind: str, labels: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in labels.items():
        yield f"__meta_kubernetes_{kind}_label_{re.sub('[^a-zA-Z0-9]', '_', name)}", value
        yield f"__meta_kubernetes_{kind}_labelpresent_{re.sub('[^a-zA-Z0-9]', '_', name)}", "true"


def _pod(release: Release, template: dict[str, Any], pod: str, port: str, phase: str = "Running") -> dict[str, str]:
    """The labels of one port of a pod."""
    (container,) = [one for one in template["spec"]["containers"] if port in [each["name"] for each in one["ports"]]]
    return {
        "__meta_kubernetes_namespace": release.namespace,
        "__meta_kubernetes_pod_name": pod,
        "__meta_kubernetes_pod_phase": phase,
        "__meta_kubernetes_pod_container_name": container["name"],
        "__meta_kubernetes_pod_container_port_name": port,
        **dict(_labels("pod", template["metadata"]["labels"])),
    }


def _matches(selector: dict[str, str], template: dict[str, Any]) -> bool:
    return set(selector.items()) <= set(template["metadata"]["labels"].items())


def endpoints(release: Release, address: str) -> list[dict[str, Any]]:
    """Every port of every Service, with the server's pod behind it. The port `http` leads to `address`."""
    template = release.one("StatefulSet")["spec"]["template"]
    found = []
    for service in release.all("Service"):
        assert _matches(service["spec"]["selector"], template)
        for port in service["spec"]["ports"]:
            labels = {
                **_pod(release, template, release.server_pod, port["targetPort"]),
                "__meta_kubernetes_service_name": service["metadata"]["name"],
                **dict(_labels("service", service["metadata"]["labels"])),
                "__meta_kubernetes_endpoint_port_name": port["name"],
                "__meta_kubernetes_endpoint_address_target_kind": "Pod",
                "__meta_kubernetes_endpoint_address_target_name": release.server_pod,
            }
            found.append({"targets": [address if port["name"] == "http" else NOWHERE], "labels": labels})
    return found


def pods(release: Release, workers: dict[str, str]) -> list[dict[str, Any]]:
    """Every port of every pod: the server's, each worker's with its address, and a worker's that has ended."""
    server, worker = release.one("StatefulSet")["spec"]["template"], release.one("Job")["spec"]["template"]
    ports = [port["name"] for container in server["spec"]["containers"] for port in container["ports"]]
    found = [{"targets": [NOWHERE], "labels": _pod(release, server, release.server_pod, port)} for port in ports]
    for pod, address in workers.items():
        found.append({"targets": [address], "labels": _pod(release, worker, pod, "metrics")})
    found.append({"targets": [NOWHERE], "labels": _pod(release, worker, f"{release.name}-done", "metrics", "Succeeded")})
    return found


# -- what the Prometheus operator makes of the monitors


def scrape_config(release: Release, kind: str, discovered: list[dict[str, Any]], interval: str) -> dict[str, Any]:
    """The part of Prometheus's configuration for a release's monitor, with a shorter interval.

    Args:
        release: Where the monitor is.
        kind: ServiceMonitor or PodMonitor.
        discovered: The targets of the monitor's namespace, instead of kubernetes_sd_configs.
        interval: Between two scrapes.
    """
    monitor, of_service = release.one(kind), kind == "ServiceMonitor"
    (endpoint,) = monitor["spec"]["endpoints" if of_service else "podMetricsEndpoints"]
    full_name = f"{release.namespace}/{monitor['metadata']['name']}"
    known = {"port", "interval", "relabelings"}
    assert endpoint.keys() <= known, f"no test does what the operator makes of {endpoint.keys() - known}"
    return {
        "job_name": f"{kind[0].lower()}{kind[1:]}/{full_name}/0",
        "honor_labels": False,
        "static_configs": discovered,
        "scrape_interval": interval,
        "relabel_configs": [
            {"source_labels": ["job"], "target_label": "__tmp_prometheus_job_name"},
            *_selected(monitor, "service" if of_service else "pod"),
            *_port_and_names(of_service, endpoint["port"], full_name),
            *[_snake_case(one) for one in endpoint["relabelings"]],
        ],
    }


def _selected(monitor: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    for name, value in monitor["spec"]["selector"]["matchLabels"].items():
        (label, _), (present, _) = _labels(kind, {name: value})
        yield {"action": "keep", "source_labels": [label, present], "regex": f"({re.escape(value)});true"}


def _port_and_names(of_service: bool, port: str, full_name: str) -> Iterator[dict[str, Any]]:
    def copy(source: str, target: str) -> dict[str, Any]:
        return {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}

    owner = "endpoint" if of_service else "pod_container"
    yield {"action": "keep", "source_labels": [f"__meta_kubernetes_{owner}_port_name"], "regex": port}
    yield copy("namespace", "namespace")
    if of_service:
        yield copy("service_name", "service")
    yield copy("pod_name", "pod")
    yield copy("pod_container_name", "container")
    yield {"action": "drop", "source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)"}
    yield copy("service_name", "job") if of_service else {"target_label": "job", "replacement": full_name}
    yield {"target_label": "endpoint", "replacement": port}


def _snake_case(relabeling: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("[A-Z]", lambda found: "_" + found[0].lower(), key): value for key, value in relabeling.items()}
