"""The Helm chart's values: wrong ones are refused by name, and every setting reaches its command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import helm_python
import pytest
from engines.chart import CHART, CI, Object, environment, found, objects, pod_specs, referred, rendered, schema_of, values_of
from gem_api.named_settings import NAMES
from gem_api.process.settings_file import key as key_of
from gem_api.rules import RULES
from gem_server.cli import main as server
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.process.cli import main as worker
from kit.scripts import script

COMMANDS: dict[str, click.Command] = {"gem-server": server, "gem-worker": worker, "gem-evaluator": evaluator}


GENERATE = script("deploy/helm/generate.py")


def leaves(values: Object, path: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    sections = {"server", "worker", "evaluator", "config", "persistence", "pdb", "data", "certManager", "issuerRef"}
    sections |= {"autoscaling"} | {
        "metrics",
        "serviceMonitor",
        "prometheusRule",
        "dashboards",
        "serviceAccount",
        "image",
        "tls",
        "auth",
    }
    of_kubernetes = "requests|limits|cpu|memory|matchLabels|kubernetes|runAs|fsGroup|seccomp|type|read|allow|cap|drop"
    freely = rf"^ *(- |grafana_dashboard|{of_kubernetes})"
    for number, line in enumerate(lines):
        key = re.match(r" *(\w+):", line)
        if key and key[1] not in sections and not re.match(freely, line):
            assert lines[number - 1].lstrip().startswith("#"), f"values.yaml:{number + 1}: {line.strip()} has no comment"


def test_the_schema_knows_every_value_of_the_chart() -> None:
    """An object without additionalProperties takes any key: only objects that belong to Kubernetes may."""
    whole = schema_of("")
    foreign = {
        "global",
        "podSecurityContext",
        "securityContext",
        "valueFrom",
        "claim",
        "namespaceSelector",
        "podSelector",
        "ipBlock",
    }
    foreign |= schema_of("server.pod")["properties"].keys() | schema_of("server.container")["properties"].keys()
    foreign |= schema_of("server.pod.affinity")["properties"].keys()

    def open_objects(part: Object, name: str) -> Iterator[str]:
        part = referred(whole, part)
        if part.get("type") == "object" and "additionalProperties" not in part:
            yield name
        for key, child in part.get("properties", {}).items():
            yield from open_objects(child, key)
        items = referred(whole, part.get("items", {}))
        if items.get("properties"):
            yield from open_objects(items, name)

    assert set(open_objects(whole, "values")) <= foreign


WRONG: list[tuple[Object, str]] = [
    ({"wroker": {}}, "wroker"),
    ({"config": {"learningrate": 0.1}}, "learningrate"),
    ({"worker": {"paralelism": 3}}, "paralelism"),
    ({"worker": {"parallelism": -1}}, "/worker/parallelism"),
    ({"worker": {"parallelism": 2.5}}, "/worker/parallelism"),
    ({"config": {"listen": "x"}}, "listen"),
    ({"worker": {"pod": {"tolerations": [{"keey": "x"}]}}}, "keey"),
    ({"worker": {"pod": {"nodeSelektor": {}}}}, "nodeSelektor"),
    ({"server": {"container": {"command": ["sh"]}}}, "command"),
    ({"server": {"persistence": {"size": "ten"}}}, "/server/persistence/size"),
    ({"server": {"persistence": {"size": 0}}}, "/server/persistence/size"),
    ({"server": {"resources": {"limits": {"memory": "2GiB"}}}}, "/server/resources/limits/memory"),
    ({"worker": {"resources": {"requests": {"cpu": "one"}}}}, "/worker/resources/requests/cpu"),
    ({"server": {"image": {"digest": "sha256:12"}}}, "/server/image/digest"),
    ({"config": {"memory_limit": "3G"}}, "config.memory_limit (3G) is more than server.resources.limits.memory (2Gi)"),
    ({"config": {"memory_limit": 2**31 + 1}}, "is more than server.resources.limits.memory (2Gi)"),
    ({"config": {"memory_limit": "1.9GiB"}, "server": {"resources": {"limits": {"memory": "2G"}}}}, "config.memory_limit"),
    ({"worker": {"resources": {"limit": {}}}}, "limit"),
    ({"config": {"rule": "gme"}}, "/config/rule"),
    ({"config": {"rule": ["gem"]}}, "/config/rule"),
    ({"config": {"kappa": 2}}, "kappa"),
    ({"config": {"local_momentum": 1}}, "/config/local_momentum"),
    ({"config": {"local_momentum": "-0.5"}}, "/config/local_momentum"),
    ({"config": {"local_momentum": "much"}}, "/config/local_momentum"),
    ({"config": {"epochs": -1}}, "/config/epochs"),
    ({"config": {"shards": "split"}}, "/config/shards"),
    ({"config": {"durability": "disk"}}, "/config/durability"),
    ({"config": {"memory_limit": "a lot"}}, "/config/memory_limit"),
    ({"metrics": {"serviceMonitor": {"interval": "15"}}}, "/metrics/serviceMonitor/interval"),
    ({"metrics": {"serviceMonitor": {"interval": "5m"}}}, "/metrics/serviceMonitor/interval"),
    ({"metrics": {"serviceMonitor": {"interval": "31s"}}}, "/metrics/serviceMonitor/interval"),
    ({"commonLabels": {"app.kubernetes.io/component": "server"}}, "app.kubernetes.io/component"),
    ({"worker": {"pod": {"labels": {"app.kubernetes.io/name": "x"}}}}, "app.kubernetes.io/name"),
    ({"fullnameOverride": "2026"}, "/fullnameOverride"),
    ({"config": {"epochs": 0}}, "the run has no limit"),
    ({"config": {"steps": 10}}, "config.steps needs worker.indexed: true"),
    ({"worker": {"container": {"env": [{"name": "GEM_TASK", "value": "x"}]}}}, "worker.container.env: GEM_TASK is set already"),
    (
        {"evaluator": {"container": {"env": [{"name": "GEM_SERVER", "value": "x"}]}}},
        "evaluator.container.env: GEM_SERVER is set already",
    ),
    (
        {"server": {"container": {"env": [{"name": "GEM_CONFIG", "value": "x"}]}}},
        "server.container.env: GEM_CONFIG is set already",
    ),
    ({"server": {"container": {"env": [{"name": "A"}, {"name": "A"}]}}}, "server.container.env: A is set already"),
    ({"config": {"until_stopped": True}}, "config.until_stopped contradicts"),
    ({"tls": {"existingSecret": "a", "certManager": {"enabled": True}}}, "tls.existingSecret"),
    ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
    ({"tls": {"enabled": False, "existingSecret": "a"}}, "tls.enabled is false, but tls names a certificate"),
    ({"worker": {"autoscaling": {"enabled": True}}}, "metrics.serviceMonitor.enabled"),
    (
        {"worker": {"autoscaling": {"enabled": True}, "indexed": True}},
        "whose pods have no numbers: set worker.indexed to false",
    ),
    ({"worker": {"autoscaling": {"waiting": 1}}}, "/worker/autoscaling/waiting"),
    (
        {"worker": {"autoscaling": {"enabled": True, "min": 9}}, "metrics": {"serviceMonitor": {"enabled": True}}},
        "worker.autoscaling.min is more than worker.parallelism",
    ),
    ({"worker": {"indexed": True, "parallelism": 0}}, "worker.parallelism"),
    ({"server": {"ranges": 0}}, "/server/ranges"),
    ({"server": {"ranges": 1.5}}, "/server/ranges"),
    ({"server": {"ranges": 2}, "config": {"durability": "snapshot"}}, "config.durability: log"),
    ({"server": {"ranges": 2}, "config": {"durability": None}}, "config.durability: log"),
    ({"server": {"ranges": 2, "persistence": {"enabled": False}}}, "server.persistence.enabled"),
    ({"server": {"ranges": 2, "persistence": {"existingClaim": "a"}}}, "server.persistence.existingClaim"),
    (
        {"server": {"ranges": 2, "container": {"env": [{"name": "GEM_PEERS"}]}}},
        "server.container.env: GEM_PEERS is set already",
    ),
    ({"config": {"peers": "a:1"}}, "peers"),
    ({"backup": {"to": "backup"}}, "/backup/to"),
    ({"backup": {"to": "/backup"}}, "backup.to is a folder: set backup.existingClaim"),
    ({"backup": {"to": "s3://bucket", "existingClaim": "nfs"}}, "set backup.to to /backup or a folder in it"),
    ({"backup": {"to": "/backups", "existingClaim": "nfs"}}, "set backup.to to /backup or a folder in it"),
    ({"backup": {"to": "s3://bucket", "schedule": "daily"}}, "/backup/schedule"),
    ({"backup": {"to": "s3://bucket", "keep": -1}}, "/backup/keep"),
    ({"backup": {"too": "s3://bucket"}}, "too"),
    ({"backup": {"to": "s3://bucket", "pod": {"hostNetwork": True}}}, "hostNetwork"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_value_is_refused_by_its_name(values: Object, named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(values)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("memory_limit", "memory"),
    [
        ("2G", "2Gi"),
        ("1.5g", "2G"),
        (2**31, "2Gi"),
        ("2G", "2.5e9"),
        ("1T", "1Ti"),
        (0, "2Gi"),
        ("1G", 2**30),
        ("100M", "200000000000m"),
    ],
    ids=str,
)
def test_a_memory_limit_within_the_containers_is_accepted(memory_limit: Any, memory: Any) -> None:
    rendered({"config": {"memory_limit": memory_limit}, "server": {"resources": {"limits": {"memory": memory}}}})


def test_a_refused_rule_lists_the_rules() -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered({"config": {"rule": "gme"}})
    assert all(rule in str(refused.value) for rule in RULES)


def test_decimals_can_be_given_on_helms_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`helm --set` makes text of them."""
    values = helm_python.parse_set_string("config.learning_rate=1e-4,config.local_momentum=0.25,worker.parallelism=20")
    assert values["config"]["local_momentum"] == "0.25"
    got = accepted("gem-server", {}, tmp_path, objects(values), monkeypatch)
    assert (got["learning_rate"], got["local_momentum"]) == (0.0001, 0.25)


# -- settings reach the commands


def accepted(
    command: str, variables: dict[str, str], folder: Path, release: list[Object], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What a command reads from these variables and the release's file. Fails if it refuses one, or does not know it."""
    known = {f"GEM_{key_of(each).upper()}" for each in COMMANDS[command].params}
    known |= {each for param in COMMANDS[command].params if isinstance(param.envvar, list) for each in param.envvar}
    others = {"GEM_SERVER", "GEM_TOKEN_FILE", "GEM_TLS_CA"} if command == "gem-server" else set()  # of gem-ctl in its container
    ours = {name for name in variables if name.startswith("GEM_")}
    assert ours <= known | others, f"{command} does not read {ours - known - others}"
    (settings,) = [each for each in release if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-config")]
    (folder / "run.toml").write_text(settings["data"]["run.toml"], encoding="utf-8")
    # A token file exists in the container alone.
    for name, value in ({**variables, "GEM_CONFIG": str(folder / "run.toml")}).items():
        if name != "GEM_TOKEN_FILE":
            monkeypatch.setenv(name, value)
    return dict(COMMANDS[command].make_context(command, []).params)


@pytest.mark.parametrize("name", ["", *CI])
def test_every_command_accepts_the_environment_and_the_file_of_its_container(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = objects(values_of(name))
    for spec in pod_specs(release).values():
        container = spec["containers"][0]
        command = "gem-server" if container["name"] == "server" else container["command"][2]
        if command in COMMANDS:
            variables = {name: value.replace("$(POD_INDEX)", "0") for name, value in environment(container).items()}
            (folder,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "config"]
            assert variables["GEM_CONFIG"] == f"{folder}/run.toml"
            (volume,) = [each for each in spec["volumes"] if each["name"] == "config"]
            assert found([each for each in release if each["metadata"]["name"] == volume["configMap"]["name"]], "ConfigMap")
            with monkeypatch.context() as patch:
                accepted(command, variables, tmp_path, release, patch)


ODD = {"integer": 1_000_000, "number": 0.000_001, "boolean": True, "string": "x=1"}


def odd_value(name: str, schema: Object) -> Any:
    """A value that is not the default, and hard to write: large, or very small."""
    if name in NAMES:
        return {
            "rule": {"name": "my_rules:Mine", "on": True},
            "optimizer": "lion",
            "schedule": {"name": "step", "versions": 1 << 50},
        }[name]
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema["type"]
    if kind == ["integer", "string"]:
        return "3G"
    value = ODD["number" if kind == ["number", "string"] else kind]
    if kind == "integer" or "number" in kind:
        value = max(min(value, schema.get("maximum", value)), schema.get("minimum", value))
    return value


EXPECTED = {"rule": {"rule": "my_rules:Mine", "rule_options": "on=true"}, "optimizer": {"optimizer": "lion"},
            "schedule": {"schedule": "step", "decay_versions": 1 << 50}, "history": Path("x=1"),
            "memory_limit": 3 << 30, "log_limit": 3 << 30}  # fmt: skip


@pytest.mark.parametrize("component", ["server", "worker", "evaluator"])
def test_every_setting_reaches_its_command_with_its_value(
    component: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: odd_value(name, each) for name, each in GENERATE.schema()["properties"].items()}
    given |= {"epochs": 0, "steps": 0, "local_steps": 1_000}
    got = accepted(
        f"gem-{component}",
        {},
        tmp_path,
        objects({"config": given, "server": {"resources": {"limits": {"memory": "4Gi"}}}}),
        monkeypatch,
    )
    settings = GENERATE.settings(component)
    assert settings
    for name in settings:
        assert got[name] == EXPECTED.get(name, given[name]), name


@pytest.mark.parametrize(
    ("change", "replaced"),
    [({"max_norm_ratio": 50}, "server"), ({"overlap": True}, "worker"), ({"evaluate_every": 9}, "evaluator"),
     ({"log_level": "debug"}, "evaluator server worker"), ({}, "")],
    ids=str,
)  # fmt: skip
def test_only_pods_that_read_a_setting_are_replaced_after_its_change(change: Object, replaced: str) -> None:
    def sums(values: Object) -> dict[str, str]:
        templates = [each["spec"]["template"] for each in objects(values) if "template" in each.get("spec", {})]
        return {
            each["metadata"]["labels"]["app.kubernetes.io/component"]: each["metadata"]["annotations"]["checksum/config"]
            for each in templates
        }

    before, after = sums({}), sums({"config": change})
    assert " ".join(sorted(name for name in before if before[name] != after[name])) == replaced
    assert before.keys() == {"server", "worker", "evaluator"}
