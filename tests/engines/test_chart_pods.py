"""The pods of the rendered chart, really started: a run with a stopped worker and a killed server, IPv6, and several servers.

Connections are encrypted, with the chart's own authority or one of cert-manager's kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.chart import ROOT, Object, found, objects, pod_specs
from engines.pods import Cluster, Container, Job, Pod, config_maps_of, docker, secrets_of, wait_until
from kit.certificates import Authority

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
TAG = "chart-test"
GROUP = 10001
# Slow enough for a stopped worker and a killed server in mid-run.
VALUES: Object = {
    "image": {"tag": TAG},
    "config": {"epochs": 60, "seed": 1, "step_seconds": 0.06, "evaluate_every": 1},
    "worker": {"parallelism": 2},
}


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    for target in ("server", "worker"):
        file = ("--file", str(ROOT / "deploy" / "Dockerfile"))
        docker("build", *file, "--target", target, "--tag", f"gem-{target}:{TAG}", str(ROOT), timeout=900)


class Release:
    """A rendered chart, and its pods on a cluster of their own."""

    def __init__(self, values: Object, more_secrets: dict[str, dict[str, bytes]] | None = None) -> None:
        self.objects = objects(values)
        self.cluster = Cluster(secrets_of(self.objects) | (more_secrets or {}), config_maps_of(self.objects))
        self.service = found(self.objects, "Service", "server")["metadata"]["name"]
        replicas = found(self.objects, "StatefulSet")["spec"]["replicas"]
        self.server_pods = [self._server_pod(index) for index in range(replicas)]
        self.server_pod = self.server_pods[0]
        self.job = Job(self.cluster, found(self.objects, "Job"))

    def _server_pod(self, index: int) -> Pod:
        """A pod of the StatefulSet, as its controller makes it: a disk for each claim, a label and a name in DNS."""
        stateful = found(self.objects, "StatefulSet")
        spec, name = stateful["spec"], stateful["metadata"]["name"]
        claims = {each["metadata"]["name"]: self.cluster.disk(GROUP) for each in spec.get("volumeClaimTemplates", [])}
        aliases = [f"{name}-{index}.{spec['serviceName']}.ml.svc", *([self.service] if index == 0 else [])]
        labels = {"apps.kubernetes.io/pod-index": str(index)}
        return self.cluster.pod(f"server-{index}", spec["template"]["spec"], claims=claims, aliases=aliases, labels=labels)

    def start_server(self, index: int = 0) -> Container:
        """Starts a server's container; returns when its readiness probe succeeds, or the container has ended."""
        server = self.server_pods[index].start()
        wait_until(lambda: not server.running or server.probe("startupProbe"), "the server starts", look=server.logs)
        assert server.running, server.logs()
        assert server.probe("readinessProbe")
        assert server.probe("livenessProbe")
        return server

    def start(self, kind: str) -> Container:
        """Starts the only pod of a kind, Deployment or Pod."""
        (spec,) = (spec for owner, spec in pod_specs(self.objects).items() if owner.startswith(f"{kind} "))
        return self.cluster.pod(kind.lower(), spec).start()


def status(server: Container) -> dict[str, Any]:
    """`gem-ctl status --json` in the server's container; empty while it does not answer."""
    text = server.run("gem-ctl", "status", "--json", check=False)
    answer: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
    return answer


@pytest.fixture
def release(request: pytest.FixtureRequest) -> Iterator[Release]:
    made = Release(getattr(request, "param", VALUES))
    try:
        yield made
    finally:
        made.cluster.close()


def ended(container: Container, seconds: float = 60) -> int:
    """Waits for the container's end, and returns its exit status."""
    wait_until(lambda: not container.running, f"{container.name} ends", seconds, container.logs)
    assert container.status is not None
    return container.status


def test_a_run_goes_on_to_its_end_after_a_stopped_worker_and_a_killed_server(release: Release) -> None:
    server = release.start_server()
    (still_open,) = re.findall("OPEN: (.*)", server.logs())
    assert "[::]:9464" in still_open, "nothing but the live page is open; the network policy closes that"
    job, evaluator = release.job, release.start("Deployment")
    job.reconcile()
    stopped, other = job.running

    def version() -> int:
        return int(status(server).get("version", 0))

    def logs() -> str:
        return "\n".join(each.logs()[-2000:] for each in (server, *job.running, *job.ended))

    wait_until(lambda: len(status(server)["workers"]) == 2 and version() > 50, "two workers train", look=logs)
    names = {worker["name"] for worker in status(server)["workers"]}
    assert names == {f"{release.job._job['metadata']['name']}-{number}" for number in (1, 2)}, "pods name their workers"
    assert {worker["transport"] for worker in status(server)["workers"]} == {"tls"}, "commits take the lane"

    stopped.signal("TERM")
    assert ended(stopped) == 143
    assert status(server)["leases_ended"]["left"] == 1, "it left the run, rather than being missed"
    assert job.reconcile() == "running"
    assert (job.failures, len(job.running)) == (0, 2), "replaced, and not counted as a failure"
    wait_until(lambda: len(status(server)["workers"]) == 2, "the replacement joins", look=logs)

    before = status(server)
    server.signal("KILL")
    assert ended(server) == 137
    server = release.start_server()
    after = status(server)
    assert after["run_id"] == before["run_id"], "the log is the run's"
    assert after["version"] >= before["version"], "no acknowledged commit is lost"
    assert all(each.running for each in job.running), "workers wait for the server"

    wait_until(lambda: job.reconcile() != "running", "the Job ends", 300, logs)
    assert (job.state, job.failures) == ("complete", 0), logs()
    assert sorted(each.status or 0 for each in job.ended) == [0, 0, 143]
    final = status(server)
    assert final["state"] == "RUN_STATE_COMPLETE"
    last = wait_until(lambda: ((s := status(server))["evaluation"] or {}).get("version") == final["version"] and s, "evaluated")
    assert last["evaluation"]["accuracy"] > 0.9

    test = release.start("Pod")
    assert ended(test) == 0, test.logs()
    assert "complete" in test.logs()
    model = server.run("sh", "-c", "gem-ctl pull - | wc -c")
    assert int(model) > 100_000, "the NOTES' way to the model"
    for container in (evaluator, server):
        container.signal("TERM")
        assert ended(container) == 0, container.logs()
    assert other.status == 0


def encrypted(values: Object, folder: Path) -> Release:
    """A release with TLS, and a Secret as cert-manager makes it, for the names of the chart's Certificate."""
    values = values | {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "private-ca"}}}}
    certificate = found(objects(values), "Certificate")["spec"]
    authority = Authority(folder)
    pair = authority.issue("gem", hosts=(*certificate["dnsNames"], *certificate["ipAddresses"]))
    secret = {"tls.crt": pair.cert.read_bytes(), "tls.key": pair.key.read_bytes(), "ca.crt": authority.cert.read_bytes()}
    return Release(values, {certificate["secretName"]: secret})


def test_a_cluster_without_ipv4_trains() -> None:
    release = Release(VALUES | {"config": VALUES["config"] | {"epochs": 2}, "worker": {"parallelism": 1}})
    try:
        server = release.start_server()
        server.lose_ipv4()
        release.job.reconcile()
        (worker,) = release.job.running
        worker.lose_ipv4()
        wait_until(lambda: release.job.reconcile() != "running", "the Job ends", 120, worker.logs)
        assert release.job.state == "complete", worker.logs()
        assert "commits go over gRPC" not in worker.logs()
        assert status(server)["state"] == "RUN_STATE_COMPLETE"
    finally:
        release.cluster.close()


def test_two_servers_train_one_model_over_tls_and_each_survives_a_kill(tmp_path: Path) -> None:
    release = encrypted(VALUES | {"server": {"ranges": 2}}, tmp_path)
    try:
        job, servers = release.job, [release.start_server(index) for index in (1, 0)][::-1]
        job.reconcile()

        def logs() -> str:
            return "\n".join(each.logs()[-2000:] for each in (*servers, *job.running, *job.ended))

        def versions() -> list[int]:
            return [int(status(server).get("version", 0)) for server in servers]

        wait_until(lambda: min(versions()) > 50, "two servers apply commits", look=logs)
        wait_until(lambda: [len(status(server)["workers"]) for server in servers] == [2, 2], "both workers on both", look=logs)
        for index in (1, 0):
            before = status(servers[index])
            servers[index].signal("KILL")
            assert ended(servers[index]) == 137
            servers[index] = release.start_server(index)
            after = status(servers[index])
            assert (after["run_id"], after["version"] >= before["version"]) == (before["run_id"], True)
            wait_until(lambda last=after: min(versions()) > last["version"] + 20, "the workers go on", look=logs)
        wait_until(lambda: job.reconcile() != "running", "the Job ends", 300, logs)
        assert (job.state, job.failures) == ("complete", 0), logs()
        assert versions()[0] == versions()[1]
        assert status(servers[0])["state"] == "RUN_STATE_COMPLETE"
        assert all("commits go over gRPC" not in each.logs() for each in job.ended)
        model = servers[0].run("sh", "-c", "gem-ctl pull - | wc -c")
        assert int(model) > 4 * 160_000, "both halves, from the pod of the server that leads"
    finally:
        release.cluster.close()


@pytest.mark.parametrize(
    "release",
    [VALUES | {"config": VALUES["config"] | {"epochs": 1}, "worker": {"indexed": True, "parallelism": 1}}],
    indirect=True,
)
def test_the_worker_of_an_indexed_job_is_named_by_its_number(release: Release) -> None:
    server = release.start_server()
    spec = found(release.objects, "Job")["spec"]["template"]["spec"]
    worker = release.cluster.pod("some-pod-xyz", spec, index=3).start()
    assert ended(worker) == 0, worker.logs()
    assert "worker-3" in worker.logs()
    assert "some-pod-xyz" not in worker.logs()
    assert status(server)["state"] == "RUN_STATE_COMPLETE"


def test_a_worker_that_is_stopped_before_it_has_a_handler_ends_at_once(release: Release) -> None:
    """There is no server: a worker that ignored the signal would wait for it for an hour."""
    worker = release.cluster.pod("early", found(release.objects, "Job")["spec"]["template"]["spec"]).start()
    worker.signal("TERM")
    assert ended(worker, 30) == 143, worker.logs()
    assert worker.logs() == "", "it was stopped while it imported"
