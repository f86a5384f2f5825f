"""The Helm chart with several servers: each has its range, its disk and its name; clients connect to the one that leads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from engines.chart import Object, environment, found, objects, values_of
from gem_api.ranges import MAX_RANGES, Range
from gem_server.cli import main as server
from gem_server.config import ServerConfig

SERVERS = 3
INDEX_LABEL = "apps.kubernetes.io/pod-index"


@pytest.fixture(scope="module")
def release() -> list[Object]:
    return objects(values_of("ranges"))


def container(of: list[Object]) -> Object:
    (only,) = found(of, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    result: Object = only
    return result


def started(of: list[Object], index: int, folder: Path) -> dict[str, str]:
    """The variables of gem-server in the pod with this index, after the container's own command."""
    one = container(of)
    (by_label,) = [each for each in one["env"] if each["name"] == "POD_INDEX"]
    assert by_label["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}}
    names = [each["name"] for each in one["env"]]
    assert names.index("POD_INDEX") < names.index("GEM_RANGE"), "Kubernetes replaces only variables that come before"
    variables = {name: value.replace("$(POD_INDEX)", str(index)) for name, value in environment(one).items()}
    for name, script in {"gem-server": "env", "tini": 'shift; exec "$@"'}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "POD_INDEX": str(index)}
    said = subprocess.run(one["command"], env=variables | path, capture_output=True, text=True, check=True, timeout=60).stdout
    return dict(line.split("=", 1) for line in said.splitlines())


@pytest.mark.parametrize("index", range(SERVERS))
def test_each_pod_has_its_range_and_only_the_leader_knows_the_others(
    release: list[Object], index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = started(release, index, tmp_path)
    (tmp_path / "run.toml").write_text(settings(release), encoding="utf-8")
    monkeypatch.setenv("GEM_CONFIG", str(tmp_path / "run.toml"))
    for name in ("GEM_RANGE", "GEM_PEERS"):
        if name in variables:
            monkeypatch.setenv(name, variables[name])
    options = server.make_context("gem-server", []).params
    assert options["range"] == Range(index, SERVERS)
    assert len(options["peers"]) == (SERVERS - 1 if index == 0 else 0)
    fields = {name: options[name] for name in ("range", "peers", "durability")}
    ServerConfig(**fields, checkpoint_dir=tmp_path).validate()


def settings(of: list[Object]) -> str:
    """The file of settings of a release with one ConfigMap."""
    text: str = found(of, "ConfigMap")["data"]["run.toml"]
    return text


def test_the_largest_number_of_servers_is_the_commands() -> None:
    of = objects({"server": {"ranges": MAX_RANGES}})
    assert len(environment(container(of))["GEM_PEERS"].split(",")) == MAX_RANGES - 1
