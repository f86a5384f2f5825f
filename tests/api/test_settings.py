"""A setting is written down once: on the command line, in the environment, or in the file of --config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from gem_api.hyperparameters import Hyperparameters
from gem_api.named_settings import parse, written
from gem_api.process.options import expanded, flags, settings_without_flags
from gem_api.process.settings_file import WithoutOption, key, unknown_variables
from gem_worker.launcher.options import run_options
from kit.commands import COMMANDS, all_options
from kit.pages import ROOT
from kit.settings import configured

server, train = COMMANDS["gem-server"], COMMANDS["gem-train"]
MAX_OPTIONS = 118  # over all commands


@pytest.fixture(autouse=True)
def _no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEM_CONFIG", raising=False)


# -- --rule, --optimizer and --schedule


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("rule", "gem:proxy=adam,kappa=2,against=0.5", {"rule": "gem", "kappa": 2.0, "rule_options": "proxy=adam against=0.5"}),
        ("rule", "diloco:delay=8, eager=0.1", {"rule": "diloco", "rule_options": "delay=8 eager=0.1"}),
        ("rule", "my.rules:Clipped", {"rule": "my.rules:Clipped"}),
        ("rule", "my.rules:Clipped:bound=1,at=a:b", {"rule": "my.rules:Clipped", "rule_options": "bound=1 at=a:b"}),
        ("rule", {"name": "gem", "kappa": 2, "proxy": "adam"}, {"rule": "gem", "kappa": 2.0, "rule_options": "proxy=adam"}),
        ("rule", {"name": "a:B", "strict": True}, {"rule": "a:B", "rule_options": "strict=true"}),
        ("optimizer", "adamw:beta2=0.99", {"optimizer": "adamw", "optimizer_options": "beta2=0.99"}),
        ("schedule", "cosine:versions=9400,warmup=100", {"schedule": "cosine", "decay_versions": 9400, "warmup_versions": 100}),
        ("schedule", "step:versions=5,factor=0.5,warmup_factor=0.1",
         {"schedule": "step", "decay_versions": 5, "decay_factor": 0.5, "warmup_factor": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_a_name_and_its_settings_set_hyper_parameters(option: str, value: Any, expected: dict[str, Any]) -> None:
    assert parse(option, value) == expected


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("rule", "gme:kappa=2", "unknown rule 'gme' (did you mean gem?): choose from gem, downpour"),
        ("rule", "gem:kappa", "the setting 'kappa' has no value: write gem:kappa=VALUE"),
        ("rule", "kappa=2", "'kappa=2' has no name: write NAME:KEY=VALUE"),
        ("rule", "gem:kappa=2,kappa=3", "the setting 'kappa' is given twice"),
        ("rule", "gem:kappa=-1", "--rule …:kappa must be greater than 0, not -1.0"),
        ("rule", "gem:kappa=much", "--rule …:kappa must be of type float, not 'much'"),
        ("rule", {"kappa": 2}, 'the table has no name: write rule = { name = "gem", KEY = VALUE }'),
        ("rule", {"name": "aeasgd", "alpha": "0.1 b=2"}, "one with a space or a comma"),
        ("schedule", "cosine:version=3",
         "schedule cosine has no setting 'version' (did you mean versions?): its settings are warmup, warmup_factor"),
        ("schedule", "cosine:versions=1.5", "--schedule …:versions must be of type int, not '1.5'"),
        ("optimizer", "adamx", "unknown optimizer 'adamx' (did you mean adam?)"),
        ("optimizer", "adamW2", "unknown optimizer 'adamW2' (did you mean adamw?)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_name_or_setting_is_one_line_with_what_is_right(option: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        parse(option, value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        Hyperparameters(),
        Hyperparameters(kappa=2.5, epsilon=1e-30, snapshot="reference", rule_options="proxy=adam", pi_max=1e6),
        Hyperparameters(rule="my:Own", rule_options="a=1 b=c:d", optimizer="worker"),
        Hyperparameters(rule="downpour", optimizer="adamw", optimizer_options="beta1=0.8 beta2=0.99", weight_decay=0.1),
        Hyperparameters(schedule="onecycle", warmup_versions=3, warmup_factor=0.25, decay_versions=1 << 62, decay_factor=0),
        Hyperparameters(shard_size=7, local_momentum=0.5, batch_variation=0.25, seed=1 << 60, steps=5, epochs=0, average=0.99),
    ],
    ids=str,
)
def test_the_server_reads_what_gem_train_hands_over(settings: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings_without_flags(settings).items():
        monkeypatch.setenv(f"GEM_{name.upper()}", str(value))
    options, _ = expanded(server.make_context("gem-server", flags(settings)))
    assert Hyperparameters(**{name: options[name] for name in vars(settings)}) == settings
    read = {name: value for option, text in written(settings).items() for name, value in parse(option, text).items()}
    assert replace(settings, **read) == settings


# -- the file


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = configured(learning_rate=0.1, batch_size=8, seed=3, rule="gem:kappa=2", lease_seconds=5)
    monkeypatch.setenv("GEM_LEARNING_RATE", "0.2")
    monkeypatch.setenv("GEM_BATCH_SIZE", "16")
    options, user_gave = expanded(server.make_context("gem-server", [file, "--learning-rate", "0.3"]))
    found = [options[name] for name in ("learning_rate", "batch_size", "seed", "kappa", "lease_seconds", "momentum")]
    assert found == [0.3, 16, 3, 2.0, 5.0, 0.9]
    assert user_gave == {"learning_rate", "batch_size", "seed", "rule", "kappa", "lease_seconds"}


def test_one_file_serves_all_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(  # as an editor on Windows does, with a byte order mark
        '\ufeffrule = { name = "gem", kappa = 2 }\nserver = "host:1"\ntask = "digits"\nworkers = 3\nworkers_per_process = 2\n'
        'durability = "log"\ntimeout = 3\nevaluate_every = 9\noverlap = true\nmemory_limit = "8G"\n'
    )
    monkeypatch.setenv("GEM_CONFIG", str(file))
    params = {
        name: command.make_context(name, ["status"] if name == "gem-ctl" else []).params for name, command in COMMANDS.items()
    }
    assert (params["gem-server"]["durability"], params["gem-server"]["memory_limit"]) == ("log", 8 << 30)
    assert (params["gem-train"]["durability"], params["gem-train"]["workers"]) == ("log", 3)
    assert [params[name]["server"] for name in ("gem-worker", "gem-evaluator", "gem-ctl")] == ["host:1"] * 3
    assert (params["gem-worker"]["workers_per_process"], params["gem-worker"]["overlap"]) == (2, True)
    assert (params["gem-evaluator"]["evaluate_every"], params["gem-ctl"]["timeout"]) == (9.0, 3.0)


def test_gem_train_hands_settings_of_its_servers_over() -> None:
    file = configured(max_norm_ratio=100, log_limit="64M", epochs=2, tokens="not/its/own")
    options, user_gave = run_options(train.make_context("gem-train", [file]))
    assert options["server_settings"] == {"max_norm_ratio": 100, "log_limit": "64M"}
    assert user_gave == {"epochs", "server_settings"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("learning-rate = 1", "'learning-rate' (did you mean learning_rate?); docs/settings.md lists them all"),
        ("kappa = 2", 'kappa is a setting of rule: write rule = "gem:kappa=VALUE"'),
        ("decay_versions = 2", 'decay_versions is a setting of schedule: write schedule = "NAME:versions=VALUE"'),
        ("learning_rate = [1]", "learning_rate must be a text, a number, true or false"),
        ("[task]\nname = 1", "task is no table: this file has no sections, so write the settings without [task]"),
        ("rule = { name = 'gem', kappa = -1 }", "--rule …:kappa must be greater than 0"),
        ("epochs = 1.5", "'1.5' is not a valid whole number"),
        ("epochs =", "Invalid value"),
        ("epochs = " + 3000 * "[" + 3000 * "]", "run.toml: its brackets are nested too deeply"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it_or_the_key(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(content + "\n")
    for command in (server, train):
        result = CliRunner().invoke(command, ["--config", str(tmp_path / "run.toml")])
        assert (result.exit_code, said in result.stderr.splitlines()[-1]) == (2, True), result.stderr


def test_a_wrong_value_is_said_with_where_it_comes_from(tmp_path: Path) -> None:
    """An argument is seen in the command itself."""
    (tmp_path / "run.toml").write_text('batch_size = "x"\n')
    wrong = "Error: Invalid value for '--batch-size': 'x' is not a valid whole number"
    for arguments, variables, where in (
        (["--config", str(tmp_path / "run.toml")], {}, f" (batch_size in {tmp_path / 'run.toml'})"),
        ([], {"GEM_BATCH_SIZE": "x"}, " (the variable GEM_BATCH_SIZE)"),
        (["--batch-size", "x"], {}, ""),
    ):
        result = CliRunner().invoke(server, arguments, env=variables)
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"{wrong}{where}.")


def test_the_variable_of_a_command_of_gem_ctl_has_that_commands_name() -> None:
    variables = {"GEM_PLAN_WORKERS": "many"}
    result = CliRunner().invoke(COMMANDS["gem-ctl"], ["plan", "--parameters", "1M"], env=variables, prog_name="gem-ctl")
    assert "(the variable GEM_PLAN_WORKERS)" in result.stderr


@pytest.mark.parametrize("command", ["pull", "plan", "track"])
def test_a_command_without_what_it_needs_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(COMMANDS["gem-ctl"], [command], prog_name="gem-ctl")
    assert (result.exit_code, f"For example: gem-ctl {command} " in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("text", ["0.1,,0.4", "-1", "inf", "fast"])
def test_what_is_no_time_is_refused_with_what_to_write(text: str) -> None:
    result = CliRunner().invoke(train, [], env={"GEM_STEP_SECONDS": text})
    assert result.exit_code == 2
    assert f"'{text}' is not a time: write seconds, as in 0.1, or several, as in 0.1,0.1,0.4" in result.stderr


# -- options


def test_there_are_few_options() -> None:
    count = {name: len(list(all_options(command))) for name, command in COMMANDS.items()}
    assert sum(count.values()) <= MAX_OPTIONS, count


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("gem-server", "--kappa", "--kappa is a setting of --rule: write --rule gem:kappa=VALUE"),
        ("gem-server", "--rule-options", "--rule-options is a setting of --rule: write --rule NAME:KEY=VALUE"),
        ("gem-train", "--decay-versions", "--decay-versions is a setting of --schedule: write --schedule NAME:versions=VALUE"),
        ("gem-server", "--memory-limit", "--memory-limit is not an option: set memory_limit in the file of --config, or "
         "GEM_MEMORY_LIMIT"),
        ("gem-worker", "--no-shared-memory", "set shared_memory in the file of --config, or GEM_SHARED_MEMORY"),
        ("gem-train", "--lr", "there is no option --lr: write --learning-rate"),
        ("gem-ctl", "--timeout", "--timeout is not an option: set timeout in the file of --config, or GEM_TIMEOUT"),
    ],
)  # fmt: skip
def test_an_option_that_is_a_setting_now_is_refused_with_what_to_write(name: str, option: str, said: str) -> None:
    result = CliRunner().invoke(COMMANDS[name], [f"{option}=1"])
    assert (result.exit_code, said in result.stderr.splitlines()[-1]) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("GEM_KAPPA", "GEM_KAPPA is a setting of --rule: write GEM_RULE=gem:kappa=VALUE"),
        ("GEM_DECAY_VERSIONS", "GEM_DECAY_VERSIONS is a setting of --schedule: write GEM_SCHEDULE=NAME:versions=VALUE"),
    ],
)
def test_a_variable_that_would_set_nothing_is_refused_with_what_to_write(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "3")
    result = CliRunner().invoke(server, ["--epochs", "1"])
    assert (result.exit_code, said in result.stderr.splitlines()[-1]) == (2, True), result.stderr


def test_a_misspelt_variable_is_warned_of_with_what_is_like_it() -> None:
    assert list(unknown_variables(["GEM_LERNING_RATE", "GEM_XYZ", "LERNING_RATE"])) == [
        "the variable GEM_LERNING_RATE is not a setting, and is ignored (did you mean GEM_LEARNING_RATE?)",
        "the variable GEM_XYZ is not a setting, and is ignored",
    ]


def test_no_variable_that_anything_of_ours_reads_or_sets_is_warned_of() -> None:
    files = ("docker-compose.yml", ".env.example", "deploy/compose.gpu.yml", "deploy/Dockerfile", "deploy/slurm", "deploy/helm")
    found = {each for command, prefix in _commands() for each in _variables(command, prefix)}
    for path in (path for name in files for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file()):
        found |= set(re.findall(r"GEM_[A-Z_]+[A-Z]", path.read_text()))
    # Of services named gem and gem-server, if a pod of another chart gets Kubernetes' links.
    links = {"GEM_SERVICE_HOST", "GEM_SERVER_SERVICE_PORT_LANE", "GEM_SERVER_PORT_50051_TCP_ADDR", "GEM_PORT_50051_TCP"}
    assert len(found) > 60
    assert not list(unknown_variables(found | links))


def _commands() -> Iterator[tuple[click.Command, str]]:
    """All commands, and what the variables of their options begin with."""
    for command in COMMANDS.values():
        yield command, "GEM"
        yield from _below(command, "GEM") if isinstance(command, click.Group) else ()


def _below(group: click.Group, prefix: str) -> Iterator[tuple[click.Command, str]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command, named = group.get_command(context, name), f"{prefix}_{name.upper()}"
        assert command is not None
        yield command, named
        yield from _below(command, named) if isinstance(command, click.Group) else ()


def _variables(command: click.Command, prefix: str) -> Iterator[str]:
    for param in command.params:
        yield from [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
        if isinstance(param, click.Option) and not param.is_eager:
            yield f"{prefix}_{str(param.name).upper()}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_settings_without_an_option(name: str) -> None:
    text = " ".join(CliRunner().invoke(COMMANDS[name], ["--help"]).output.split())
    settings = [key(param) for param in COMMANDS[name].params if isinstance(param, WithoutOption)]
    assert settings
    assert ", ".join(sorted(settings)) in text
