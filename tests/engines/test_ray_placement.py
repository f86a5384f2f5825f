"""On which nodes Ray runs workers, and what it reserves for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from engines.ray_cluster import OnRay, RayCluster, ray_cluster
from gem_worker.launcher.cluster import MAX_RESTARTS, ClusterError
from gem_worker.launcher.ray_host import RayHost
from gem_worker.launcher.ray_placement import Placement
from kit.pages import ROOT
from kit.server import wait_until
from kit.settings import configured
from launcher.train_helpers import read_json

pytestmark = pytest.mark.timeout(600)
FAR = "127.0.0.2"  # the second node


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster with one node, to which the first test adds another."""
    with ray_cluster(2, joined=True) as cluster:
        yield cluster


def test_workers_wait_for_a_node_with_their_labels_which_an_autoscaler_may_add(cluster: RayCluster, tmp_path: Path) -> None:
    """Their actors have names, by which Ray's tools show the run that they belong to."""
    settings = configured(ray_address=cluster.address, ray_labels="zone=in(far,farther),disk=!hdd")
    run = OnRay(tmp_path, "--on", "ray", "--workers", "2", "--until-stopped", settings)
    try:
        said = run.until_it_says(r"(no node of the Ray cluster has what a worker needs: .*)")
        assert said == (
            "no node of the Ray cluster has what a worker needs: CPU=1,zone=in(far,farther),disk=!hdd; the nodes have CPU=2. "
            "The workers wait until Ray has one"
        )
        cluster.add_node(FAR, cpus=2, labels="zone=far")
        wait_until(lambda: len(cluster.actors(FAR)) == 2, "both workers on the node that has come")
        run.until_version(1)
        named = [(each["namespace"], each["name"]) for each in ray.util.list_named_actors(all_namespaces=True)]
        assert sorted(named) == [("gem", f"worker-{number}@{run.address}") for number in range(2)]
        run.process.terminate()
        assert run.wait() == 130, run.output
    finally:
        run.close()
    assert read_json(run.folder / "summary.json")["outcome"] == "stopped"


def test_spread_workers_use_as_many_nodes_as_possible(cluster: RayCluster) -> None:
    """Ray's own order fills the first node first."""
    actors = [Placement(spread=True).actor_class().remote() for _ in range(2)]
    try:
        pids = {pid for _, pid, _ in ray.get([actor.report.remote() for actor in actors])}
        assert len(pids & set(cluster.actors(FAR))) == 1
    finally:
        for actor in actors:
            ray.kill(actor)


def test_what_ray_reserves_for_an_actor() -> None:
    placement = Placement.parsed("CPU=2, GPU=0.5,node=1,memory=1e9", "zone=in(a,b), disk=!hdd", spread=True)
    assert placement == Placement(
        {"CPU": 2.0, "GPU": 0.5, "node": 1.0, "memory": 1e9}, {"zone": "in(a,b)", "disk": "!hdd"}, spread=True
    )
    options = placement.actor_class("name")._default_options
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (2.0, 0.5, {"node": 1.0})
    assert (options["memory"], options["max_restarts"], options["max_task_retries"]) == (1e9, MAX_RESTARTS, -1)
    assert (options["label_selector"], options["scheduling_strategy"]) == ({"zone": "in(a,b)", "disk": "!hdd"}, "SPREAD")
    assert Placement().actor_class()._default_options["scheduling_strategy"] is None, "a trial of Ray Tune keeps its own room"


@pytest.mark.parametrize(
    ("resources", "labels", "says"),
    [(amount, "", f"--resources {amount!r}: write NAME=AMOUNT") for amount in ("CPU=inf", "CPU=nan", "CPU=-1", "CPU", "")]
    + [("CPU=1", label, f"ray_labels {label!r}: write NAME=VALUE") for label in ("zone", "zone=a b", "=a", "zone=in(a")],
)
def test_what_ray_does_not_take_is_one_line(resources: str, labels: str, says: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(says)):
        Placement.parsed(resources, labels)


@pytest.mark.parametrize(
    ("labels", "fits"),
    [
        ("", True),
        ("zone=a", True),
        ("zone=b", False),
        ("zone=!a", False),
        ("zone=!b", True),
        ("other=!b", True),
        ("other=b", False),
        ("zone=in(b,a)", True),
        ("zone=!in(b,a)", False),
        ("zone=a,other=b", False),
    ],
)
def test_a_node_is_looked_for_as_ray_does(labels: str, fits: bool) -> None:
    node = {"Alive": True, "Resources": {"CPU": 1.0}, "Labels": {"zone": "a"}}
    placement = Placement.parsed("CPU=1", labels)
    assert (placement.why_waiting([node]) is None) == fits
    assert placement.why_waiting([{**node, "Alive": False}])
    assert Placement.parsed("CPU=2", labels).why_waiting([node])


@pytest.mark.parametrize("placement", [Placement(spread=True), Placement(labels={"zone": "a"})], ids=["spread", "labels"])
def test_workers_stay_in_the_room_of_their_trial(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: object())
    with pytest.raises(ClusterError, match="leave out spread and labels"):
        RayHost("auto", placement)._check_room()


def test_no_private_name_of_ray_is_used() -> None:
    """Such a name may mean something else in the next version."""
    worker = ROOT / "worker/gem_worker"
    for path in (*worker.glob("ray/*.py"), *worker.glob("launcher/ray_*.py")):
        assert not re.search(r"\bray(\.\w+)*\._|import _", path.read_text(encoding="utf-8")), path
