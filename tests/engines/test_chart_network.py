"""Who may connect to whom, by the chart's network policies: they are read as Kubernetes defines them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network

import pytest
from engines.chart import NAMESPACE, WITH_PODS, Object, objects, pod_of, pod_specs, values_of

GRPC, LANE, PAGE, WORKERS_METRICS, DNS, HTTPS = 50051, 50052, 9464, 9465, 53, 443
CLIENTS = ("worker", "evaluator", "test")
PORTS = (GRPC, LANE, PAGE, WORKERS_METRICS, DNS, HTTPS)


@dataclass(frozen=True)
class End:
    """A pod, or an address outside the cluster if there is no namespace."""

    name: str
    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict, hash=False)
    address: str = "10.1.1.1"


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector fits. Fails at an operator that the chart does not use."""
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    return set(selector.get("matchLabels", {}).items()) <= set(labels.items())


def is_peer(peer: Object, end: End) -> bool:
    if "ipBlock" in peer:
        return not end.namespace and ip_address(end.address) in ip_network(peer["ipBlock"]["cidr"])
    of_namespace = {"kubernetes.io/metadata.name": end.namespace}
    within = selects(peer["namespaceSelector"], of_namespace) if "namespaceSelector" in peer else end.namespace == NAMESPACE
    return bool(end.namespace) and within and selects(peer.get("podSelector", {}), end.labels)


def lets(policies: list[Object], direction: str, end: End, other: End, port: int) -> bool:
    """Whether a pod's policies let a TCP connection pass. A pod that none selects is open; a rule without peers is for all."""
    of_pod = [
        each["spec"]
        for each in policies
        if end.namespace == NAMESPACE
        and selects(each["spec"]["podSelector"], end.labels)
        and direction in each["spec"]["policyTypes"]
    ]
    rules = [rule for spec in of_pod for rule in spec.get(direction.lower(), [])]
    peers = "from" if direction == "Ingress" else "to"
    return not of_pod or any(
        port in [one["port"] for one in rule["ports"] if one.get("protocol", "TCP") == "TCP"]
        and (peers not in rule or any(is_peer(peer, other) for peer in rule[peers]))
        for rule in rules
    )


def ends(of: list[Object]) -> Iterator[End]:
    """A pod of each part of the release, and others around it."""
    for each in of:
        if each["kind"] in WITH_PODS:
            labels = pod_of(each)["metadata"]["labels"]
            yield End(labels["app.kubernetes.io/component"], NAMESPACE, labels)
    yield End("neighbour", NAMESPACE, {"app": "other"})
    yield End("prometheus", "monitoring", {"app": "prometheus"})
    yield End("resolver", "kube-system", {"k8s-app": "kube-dns"})
    yield End("internet", address="203.0.113.5")


def connections(values: Object) -> set[tuple[str, str, int]]:
    """All connections that are allowed and that an end of the release has a part in: (from, to, port)."""
    of = objects(values)
    policies = [each for each in of if each["kind"] == "NetworkPolicy"]
    ours = {"server", "backup", *CLIENTS}
    return {
        (source.name, target.name, port)
        for source, target in itertools.product(ends(of), repeat=2)
        for port in PORTS
        if {source.name, target.name} & ours
        and lets(policies, "Egress", source, target, port)
        and lets(policies, "Ingress", target, source, port)
    }


def test_a_pod_of_each_part_has_a_policy_in_both_directions() -> None:
    of = objects()
    assert len(pod_specs(of)) == 4
    for end in itertools.islice(ends(of), 4):
        policies = [
            each["spec"] for each in of if each["kind"] == "NetworkPolicy" and selects(each["spec"]["podSelector"], end.labels)
        ]
        assert [each["policyTypes"] for each in policies] == [["Ingress", "Egress"]], end


TO_SERVER = {(client, "server", port) for client in CLIENTS for port in (GRPC, LANE)}
METRICS = {("prometheus", "server", PAGE), *(("prometheus", client, WORKERS_METRICS) for client in CLIENTS)}


def names(client: str) -> set[tuple[str, str, int]]:
    """A pod may ask any resolver outside the release."""
    return {(client, other, DNS) for other in ("neighbour", "prometheus", "resolver", "internet")}


RESOLVING = set().union(*map(names, CLIENTS))


def test_pods_reach_the_server_and_names_and_the_server_reaches_nothing() -> None:
    assert connections({}) == TO_SERVER | METRICS | RESOLVING


def test_servers_of_one_model_ask_each_other() -> None:
    more = {("server", "server", GRPC), *names("server")}
    assert connections({"server": {"ranges": 2}}) == TO_SERVER | METRICS | RESOLVING | more


def test_peers_of_the_values_are_let_in_and_out_and_nobody_else() -> None:
    values: Object = {
        "networkPolicy": {
            "metricsFrom": [],
            "clients": [{"podSelector": {"matchLabels": {"app": "other"}}}],
            "workerEgress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": HTTPS}]}],
            "serverEgress": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": HTTPS}]}],
        }
    }
    elsewhere = {("server", other, HTTPS) for other in ("neighbour", "prometheus", "resolver")}
    assert connections(values) == {
        *TO_SERVER, *RESOLVING, ("neighbour", "server", GRPC), ("neighbour", "server", LANE),
        *((client, "internet", HTTPS) for client in CLIENTS), *elsewhere, *names("server"),
    }  # fmt: skip


@pytest.mark.parametrize("ranges", [1, 3])
def test_the_backup_reaches_the_server_and_every_store_and_nobody_reaches_it(ranges: int) -> None:
    found = connections({"backup": {"to": "s3://bucket/demo"}, "server": {"ranges": ranges}})
    backups = {each for each in found if "backup" in each}
    stores = {("backup", other, port) for other in ("neighbour", "prometheus", "resolver", "internet") for port in PORTS}
    assert backups == {("backup", "server", GRPC), *stores}


@pytest.mark.parametrize("name", ["full", "elastic"])
def test_the_workers_of_a_values_file_reach_the_server(name: str) -> None:
    assert ("worker", "server", GRPC) in connections({**values_of(name), "extraObjects": []})


def test_without_policies_everything_is_open() -> None:
    assert ("internet", "server", PAGE) in connections({"networkPolicy": {"enabled": False}})
