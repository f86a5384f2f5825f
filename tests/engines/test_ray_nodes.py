"""gem-train on a Ray cluster of two nodes, with actors and a node that die: the run goes on and loses no sample."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines.ray_cluster import OnRay, RayCluster, ray_cluster
from kit.process import environment
from kit.server import wait_until
from kit.settings import configured
from launcher.train_helpers import PATIENCE, assert_every_sample_accounted_for, commits, read_json

pytestmark = pytest.mark.timeout(900)
EPOCHS = 60
# Joining takes minutes on a busy machine, and the run must not end before.
OWN_TASK = '''
from pathlib import Path

from gem_worker.tasks.digits import Digits
from kit.server import wait_until

GATE = Path(__file__).with_name("gate")


class Gated(Digits):
    """Digits that train on when the gate is open; until then a worker computes ten gradients at most."""

    computed = 0

    def loss(self, model, batch):
        self.computed += model.training
        if self.computed > 10:
            wait_until(GATE.exists, "the gate to open", 600)
        return super().loss(model, batch)
'''
# Needs a resource that only the head has, since its CPUs are taken when the other node is gone.
JOIN = """
import sys
from pathlib import Path
import gem_worker.ray
address, run, ray_address = sys.argv[1:]
token = (Path(run) / "worker-token").read_text().strip()
gem_worker.ray.join(address, "own_task:Gated", workers=2, token=token, resources_per_worker={"CPU": 0, "joiner": 1},
                    ray_address=ray_address, logs=Path(run) / "logs")
print("the run is over")
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    with ray_cluster(6, token=True, joiner=2) as cluster:
        cluster.add_node("127.0.0.2", cpus=4)
        yield cluster


@pytest.mark.slow
def test_eight_actors_one_killed_two_joined_one_node_stopped(cluster: RayCluster, tmp_path: Path) -> None:
    run = OnRay(
        tmp_path, "--on", "ray", "--workers", "8", "--task", "own_task:Gated", "--epochs", str(EPOCHS),
        configured(ray_address=cluster.address, lease_seconds=5),
    )  # fmt: skip
    try:
        run.until_version(1)
        with joining(run, cluster) as join:
            wait_until(lambda: len(workers_with_commits(run)) >= 8, "eight workers", PATIENCE)
            assert cluster.actors("127.0.0.2"), "no worker runs on the second node"
            os.kill(cluster.actors(cluster.head)[0], signal.SIGKILL)
            run.until_it_says(r"(worker-\d) died; Ray restarted it on ")
            joined = wait_until(lambda: joiners(run), "two more workers", PATIENCE)

            lost = len(cluster.actors("127.0.0.2"))
            before = run.until_version(1)
            cluster.stop_node("127.0.0.2")
            (tmp_path / "gate").touch()
            assert run.wait() == 0, run.output
            output, _ = join.communicate(timeout=PATIENCE)
            assert (join.returncode, output.splitlines()[-1]) == (0, "the run is over"), output
    finally:
        run.close()
    summary = read_json(run.folder / "summary.json")
    assert summary["outcome"] == "complete"
    assert summary["test_accuracy"] >= 0.95
    assert_every_sample_accounted_for(run.folder, EPOCHS)
    assert summary["commits"] >= before + 300, "it did not go on without the node"
    by = {row["worker"] for row in commits(run.folder)}
    assert by == {f"worker-{number}" for number in range(8)} | joined
    ended = summary["leases_ended"]
    assert sum(ended.values()) - ended["left"] >= 1 + lost, f"leases of dead workers: {ended}"


@contextmanager
def joining(run: OnRay, cluster: RayCluster) -> Iterator[subprocess.Popen[str]]:
    """A process that adds two workers to the run; it is killed if the test fails."""
    command = [sys.executable, "-c", JOIN, run.address, str(run.folder), cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def workers_with_commits(run: OnRay) -> set[str]:
    """The names of the workers in the run whose commits have been applied."""
    with run.admin() as admin:
        return {worker.name for worker in admin.status().workers if worker.commits}


def joiners(run: OnRay) -> set[str]:
    """The names of the workers that joined, once both have committed."""
    names = {name for name in workers_with_commits(run) if name.startswith("joined-")}
    return names if len(names) == 2 else set()
