"""The Helm chart's values: wrong ones are refused by name, and every option reaches its command."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click
import helm_python
import pytest
from engines.chart import CHART, CI, Object, environment, objects, pod_specs, rendered, values_of
from gem_api.hyperparameters import DECLARATIONS, RULES
from gem_server.cli import main as server
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.process.cli import main as worker

COMMANDS: dict[str, click.Command] = {"gem-server": server, "gem-worker": worker, "gem-evaluator": evaluator}


def generator() -> ModuleType:
    """deploy/helm/generate.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("generate_chart", CHART.parent / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = generator()


def test_the_lists_of_options_are_up_to_date() -> None:
    changed = [path.name for path, text in GENERATE.files().items() if path.read_text(encoding="utf-8") != text]
    assert not changed, f"run python deploy/helm/generate.py: {changed}"


def test_every_hyper_parameter_is_a_value_of_the_run() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    camel = {re.sub(r"_(\w)", lambda letter: letter[1].upper(), name) for name in DECLARATIONS}
    assert schema["properties"]["run"]["properties"].keys() == camel | {"untilStopped"}


def leaves(values: Object, path: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    sections = {"server", "worker", "evaluator", "options", "persistence", "pdb", "data", "certManager", "issuerRef"}
    sections |= {"metrics", "serviceMonitor", "prometheusRule", "dashboards", "serviceAccount", "image", "run", "tls", "auth"}
    of_kubernetes = "requests|limits|cpu|memory|matchLabels|kubernetes|runAs|fsGroup|seccomp|type|read|allow|cap|drop"
    freely = rf"^ *(- |grafana_dashboard|{of_kubernetes})"
    for number, line in enumerate(lines):
        key = re.match(r" *(\w+):", line)
        if key and key[1] not in sections and not re.match(freely, line):
            assert lines[number - 1].lstrip().startswith("#"), f"values.yaml:{number + 1}: {line.strip()} has no comment"


def test_the_schema_knows_every_value_of_the_chart() -> None:
    """An object without additionalProperties takes any key: only objects that belong to Kubernetes may."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    foreign = {"global", "podSecurityContext", "securityContext", "nodeAffinity", "podAffinity", "podAntiAffinity", "valueFrom",
               "namespaceSelector", "podSelector", "ipBlock"}  # fmt: skip

    def open_objects(part: Object, name: str) -> Iterator[str]:
        if part.get("type") == "object" and "additionalProperties" not in part:
            yield name
        for key, child in part.get("properties", {}).items():
            yield from open_objects(child, key)
        if "items" in part and part["items"].get("properties"):
            yield from open_objects(part["items"], name)

    assert set(open_objects(schema, "values")) <= foreign


WRONG: list[tuple[Object, str]] = [
    ({"wroker": {}}, "wroker"),
    ({"run": {"learningrate": 0.1}}, "learningrate"),
    ({"worker": {"paralelism": 3}}, "paralelism"),
    ({"worker": {"parallelism": -1}}, "/worker/parallelism"),
    ({"worker": {"parallelism": 2.5}}, "/worker/parallelism"),
    ({"worker": {"options": {"listen": "x"}}}, "listen"),
    ({"worker": {"tolerations": [{"keey": "x"}]}}, "keey"),
    ({"worker": {"resources": {"limit": {}}}}, "limit"),
    ({"run": {"rule": "gme"}}, "/run/rule"),
    ({"run": {"momentum": 1}}, "/run/momentum"),
    ({"run": {"momentum": "-0.5"}}, "/run/momentum"),
    ({"run": {"momentum": "much"}}, "/run/momentum"),
    ({"run": {"epochs": -1}}, "/run/epochs"),
    ({"run": {"shards": "split"}}, "/run/shards"),
    ({"server": {"options": {"durability": "disk"}}}, "/server/options/durability"),
    ({"server": {"options": {"memoryLimit": "a lot"}}}, "/server/options/memoryLimit"),
    ({"metrics": {"serviceMonitor": {"interval": "15"}}}, "/metrics/serviceMonitor/interval"),
    ({"metrics": {"serviceMonitor": {"interval": "5m"}}}, "/metrics/serviceMonitor/interval"),
    ({"metrics": {"serviceMonitor": {"interval": "31s"}}}, "/metrics/serviceMonitor/interval"),
    ({"podLabels": {"app.kubernetes.io/component": "server"}}, "app.kubernetes.io/component"),
    ({"fullnameOverride": "2026"}, "/fullnameOverride"),
    ({"run": {"epochs": 0}}, "the run has no limit"),
    ({"run": {"steps": 10}}, "run.steps needs worker.indexed: true"),
    ({"worker": {"extraEnv": [{"name": "GEM_TASK", "value": "x"}]}}, "worker.extraEnv: GEM_TASK is set already"),
    ({"evaluator": {"extraEnv": [{"name": "GEM_SERVER", "value": "x"}]}}, "evaluator.extraEnv: GEM_SERVER is set already"),
    ({"server": {"extraEnv": [{"name": "GEM_EPOCHS", "value": "1"}]}}, "server.extraEnv: GEM_EPOCHS is set already"),
    ({"server": {"extraEnv": [{"name": "A"}, {"name": "A"}]}}, "server.extraEnv: A is set already"),
    ({"run": {"untilStopped": True}}, "run.untilStopped contradicts"),
    ({"tls": {"existingSecret": "a", "certManager": {"enabled": True}}}, "tls.existingSecret"),
    ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
    ({"worker": {"indexed": True, "parallelism": 0}}, "worker.parallelism"),
    ({"server": {"ranges": 0}}, "/server/ranges"),
    ({"server": {"ranges": 1.5}}, "/server/ranges"),
    ({"server": {"ranges": 2, "options": {"durability": "snapshot"}}}, "server.options.durability: log"),
    ({"server": {"ranges": 2, "options": {"durability": None}}}, "server.options.durability: log"),
    ({"server": {"ranges": 2, "persistence": {"enabled": False}}}, "server.persistence.enabled"),
    ({"server": {"ranges": 2, "persistence": {"existingClaim": "a"}}}, "server.persistence.existingClaim"),
    ({"server": {"ranges": 2, "extraEnv": [{"name": "GEM_PEERS"}]}}, "server.extraEnv: GEM_PEERS is set already"),
    ({"server": {"options": {"peers": "a:1"}}}, "peers"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_value_is_refused_by_its_name(values: Object, named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(values)
    assert named in str(refused.value)


def test_a_refused_rule_lists_the_rules() -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered({"run": {"rule": "gme"}})
    assert all(rule in str(refused.value) for rule in RULES)


def test_decimals_can_be_given_on_helms_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`helm --set` makes text of them."""
    values = helm_python.parse_set_string("run.learningRate=1e-4,run.momentum=0.25,worker.parallelism=20")
    assert values["run"]["momentum"] == "0.25"
    (container,) = pod_specs(objects(values))["StatefulSet demo-gem-server"]["containers"]
    got = accepted("gem-server", environment(container), monkeypatch)
    assert (got["learning_rate"], got["momentum"]) == (0.0001, 0.25)


# -- options reach the commands


def accepted(command: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that a command reads from these variables. Fails if it refuses one, or does not know it."""
    known = {GENERATE.variable(each) for each in COMMANDS[command].params}
    known |= {each for param in COMMANDS[command].params if isinstance(param.envvar, list) for each in param.envvar}
    others = {"GEM_SERVER", "GEM_TOKEN_FILE", "GEM_TLS_CA"} if command == "gem-server" else set()  # of gem-ctl in its container
    ours = {name for name in variables if name.startswith("GEM_")}
    assert ours <= known | others, f"{command} does not read {ours - known - others}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    files = [name for name in variables if name in ("GEM_TOKEN_FILE",)]
    for name in files:
        monkeypatch.delenv(name)  # a file that exists in the container alone
    return dict(COMMANDS[command].make_context(command, []).params)


@pytest.mark.parametrize("name", ["", *CI])
def test_every_command_accepts_the_environment_of_its_container(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in pod_specs(objects(values_of(name))).values():
        container = spec["containers"][0]
        command = "gem-server" if container["name"] == "server" else container["command"][0]
        if command in COMMANDS:
            variables = {name: value.replace("$(POD_INDEX)", "0") for name, value in environment(container).items()}
            with monkeypatch.context() as patch:
                accepted(command, variables, patch)


ODD = {"integer": 1_000_000, "number": 0.000_001, "boolean": True, "string": "x=1"}


def odd_value(name: str, schema: Object) -> Any:
    """A value that is not the default, and hard to write: large, or very small."""
    if name == "rule":
        return "my_rules:Mine"
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema["type"]
    if kind == ["integer", "string"]:
        return "3G"
    value = ODD["number" if kind == ["number", "string"] else kind]
    if kind == "integer" or "number" in kind:
        value = max(min(value, schema.get("maximum", value)), schema.get("minimum", value))
    return value


@pytest.mark.parametrize("place", ["run", "server.options", "worker.options", "evaluator.options"])
def test_every_option_reaches_its_command_with_its_value(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = GENERATE.schema(place)["properties"]
    given = {name: odd_value(name, each) for name, each in schema.items()}
    values: Object = {place: given}
    if place == "run":
        given |= {"epochs": 0, "steps": 0, "localSteps": 1_000}
    else:
        values = {place.partition(".")[0]: {"options": given}}
    component = {"run": "server"}.get(place, place.partition(".")[0])
    (container,) = (
        each["containers"][0] for each in pod_specs(objects(values)).values() if each["containers"][0]["name"] == component
    )
    variables = environment(container)
    got = accepted(f"gem-{component}", variables, monkeypatch)
    by_key = {GENERATE.key(each): got[each.name] for each in GENERATE.options(place)}
    for name, value in given.items():
        expected = 3 << 30 if value == "3G" else value
        assert (str(by_key[name]) if name == "history" else by_key[name]) == expected, f"{place}.{name}"
