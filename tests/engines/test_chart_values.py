"""The Helm chart's values: wrong ones are refused by name, and every setting reaches its command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import helm_python
import pytest
from engines.chart import CI, Object, environment, found, objects, pod_specs, referred, rendered, schema_of, values_of
from gem_api.process.settings import ALL_SETTINGS
from gem_api.process.settings_file import key as key_of
from gem_server.cli import main as server
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.process.cli import main as worker

COMMANDS: dict[str, click.Command] = {"gem-server": server, "gem-worker": worker, "gem-evaluator": evaluator}


def test_the_schema_knows_every_value_of_the_chart() -> None:
    """An object without additionalProperties takes any key: only objects that belong to Kubernetes may."""
    whole = schema_of("")
    foreign = {"global", "podSecurityContext", "securityContext", "valueFrom", "claim"}
    foreign |= {"namespaceSelector", "podSelector", "ipBlock"}
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


# A value for each rule of the schema's own part (that of `config` is made from the table of settings), and for each check of
# several values together.
AUTOSCALING: Object = {"worker": {"autoscaling": {"enabled": True}}}
MONITOR: Object = {"metrics": {"serviceMonitor": {"enabled": True}}}
WRONG: list[tuple[Object, str]] = [
    ({"wroker": {}}, "wroker"),
    ({"config": {"learningrate": 0.1}}, "learningrate"),
    ({"config": {"rule": "gme"}}, "/config/rule"),
    ({"config": {"local_momentum": "much"}}, "/config/local_momentum"),
    ({"config": {"step_seconds": "0.1;0.4"}}, "/config/step_seconds"),
    ({"worker": {"parallelism": -1}}, "/worker/parallelism"),
    ({"worker": {"pod": {"tolerations": [{"keey": "x"}]}}}, "keey"),
    ({"server": {"container": {"command": ["sh"]}}}, "command"),
    ({"server": {"persistence": {"size": "ten"}}}, "/server/persistence/size"),
    ({"server": {"resources": {"limits": {"memory": "2GiB"}}}}, "/server/resources/limits/memory"),
    ({"worker": {"resources": {"requests": {"cpu": "one"}}}}, "/worker/resources/requests/cpu"),
    ({"server": {"image": {"digest": "sha256:12"}}}, "/server/image/digest"),
    ({"server": {"ranges": 0}}, "/server/ranges"),
    ({"metrics": {"serviceMonitor": {"interval": "31s"}}}, "/metrics/serviceMonitor/interval"),
    ({"commonLabels": {"app.kubernetes.io/component": "server"}}, "app.kubernetes.io/component"),
    ({"fullnameOverride": "2026"}, "/fullnameOverride"),
    ({"worker": {"autoscaling": {"waiting": 1}}}, "/worker/autoscaling/waiting"),
    ({"backup": {"to": "backup"}}, "/backup/to"),
    ({"backup": {"to": "s3://bucket", "schedule": "daily"}}, "/backup/schedule"),
    ({"backup": {"to": "s3://bucket", "keep": -1}}, "/backup/keep"),
    ({"config": {"memory_limit": "3G"}}, "config.memory_limit (3G) is more than server.resources.limits.memory (2Gi)"),
    ({"config": {"memory_limit": 2**31 + 1}}, "is more than server.resources.limits.memory (2Gi)"),
    ({"config": {"memory_limit": "1.9GiB"}, "server": {"resources": {"limits": {"memory": "2G"}}}}, "config.memory_limit"),
    ({"config": {"epochs": 0}}, "the run has no limit"),
    ({"config": {"until_stopped": True}}, "config.until_stopped contradicts"),
    ({"config": {"steps": 10}}, "config.steps needs worker.indexed: true"),
    ({"worker": {"indexed": True, "parallelism": 0}}, "worker.parallelism"),
    ({"worker": {"container": {"env": [{"name": "GEM_TASK"}]}}}, "worker.container.env: GEM_TASK is set already"),
    ({"server": {"container": {"env": [{"name": "A"}, {"name": "A"}]}}}, "server.container.env: A is set already"),
    ({"tls": {"existingSecret": "a", "certManager": {"enabled": True}}}, "tls.existingSecret"),
    ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
    ({"tls": {"enabled": False, "existingSecret": "a"}}, "tls.enabled is false, but tls names a certificate"),
    (AUTOSCALING, "metrics.serviceMonitor.enabled"),
    ({"worker": {"indexed": True, **AUTOSCALING["worker"]}}, "whose pods have no numbers: set worker.indexed to false"),
    ({"worker": {"autoscaling": {"enabled": True, "min": 9}}, **MONITOR}, "worker.autoscaling.min is more than"),
    ({"server": {"ranges": 2}, "config": {"durability": "snapshot"}}, "config.durability: log"),
    ({"server": {"ranges": 2, "persistence": {"enabled": False}}}, "server.persistence.enabled"),
    ({"server": {"ranges": 2, "persistence": {"existingClaim": "a"}}}, "server.persistence.existingClaim"),
    ({"backup": {"to": "/backup"}}, "backup.to is a folder: set backup.existingClaim"),
    ({"backup": {"to": "/backups", "existingClaim": "nfs"}}, "set backup.to to /backup or a folder in it"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_value_is_refused_by_its_name(values: Object, named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(values)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("memory_limit", "memory"),
    [("2G", "2Gi"), ("1.5g", "2G"), (2**31, "2Gi"), ("2G", "2.5e9"), (0, "2Gi"), ("1G", 2**30), ("100M", "200000000000m")],
    ids=str,
)
def test_a_memory_limit_within_the_containers_is_accepted(memory_limit: Any, memory: Any) -> None:
    rendered({"config": {"memory_limit": memory_limit}, "server": {"resources": {"limits": {"memory": memory}}}})


def test_decimals_can_be_given_on_helms_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`helm --set` makes text of them."""
    values = helm_python.parse_set_string("config.learning_rate=1e-4,config.local_momentum=0.25,worker.parallelism=20")
    assert values["config"]["local_momentum"] == "0.25"
    got = accepted("gem-server", {}, tmp_path, objects(values), monkeypatch)
    assert (got["learning_rate"], got["local_momentum"]) == (0.0001, 0.25)


def test_a_setting_whose_default_is_a_number_takes_a_number() -> None:
    known = schema_of("config")["properties"]
    numbers = {row.key for row in ALL_SETTINGS if row.key in known and re.fullmatch(r"[\d.]+", str(row.default))}
    assert "step_seconds" in numbers
    assert [key for key in numbers if known[key].get("type") == "string"] == []


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


# What is hard to write: large or very small numbers, and settings with settings of their own.
GIVEN: Object = {
    "epochs": 0, "steps": 0, "until_stopped": True, "shard_size": 1_000_000, "learning_rate": 0.000_001,
    "overlap": True, "log_level": "debug", "rule": {"name": "my_rules:Mine", "on": True},
    "schedule": {"name": "step", "versions": 1 << 50}, "memory_limit": "3G",
    "max_norm_ratio": 1e300, "evaluate_every": 0.5, "step_seconds": 0.06,
}  # fmt: skip
READ: dict[str, Object] = {
    "gem-server": GIVEN | {
        "rule": {"rule": "my_rules:Mine", "rule_options": "on=true"}, "memory_limit": 3 << 30,
        "schedule": {"schedule": "step", "decay_versions": 1 << 50},
    },
    "gem-worker": GIVEN | {"step_seconds": "0.06"}, "gem-evaluator": GIVEN,
}  # fmt: skip


@pytest.mark.parametrize("command", READ)
def test_settings_reach_their_command_with_their_values(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = objects({"config": GIVEN, "server": {"resources": {"limits": {"memory": "4Gi"}}}})
    got = accepted(command, {}, tmp_path, release, monkeypatch)
    read = got.keys() & GIVEN.keys()
    assert "log_level" in read
    assert {name: got[name] for name in read} == {name: READ[command][name] for name in read}


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
