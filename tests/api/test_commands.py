"""The --help of the commands: headings, environment variables and exit statuses, on a terminal of 80 columns."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

import click
import pytest
import structlog
from click.testing import CliRunner
from gem_api.process import logs
from gem_api.process.options import heading_of
from gem_api.process.settings import LOG_LEVELS
from gem_api.process.settings_file import key
from gem_worker import command as worker_statuses
from kit.commands import COMMANDS, all_options, options
from kit.process import python

server, worker, train, ctl = (COMMANDS[name] for name in ("gem-server", "gem-worker", "gem-train", "gem-ctl"))
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OPERATING = Path(__file__).parents[2] / "docs/guides/operating.md"


def help_of(command: click.Command, name: str) -> str:
    return CliRunner().invoke(command, ["--help"], prog_name=name, terminal_width=80).output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_heading_and_the_help_fits_80_columns(name: str) -> None:
    assert [option.name for option in options(COMMANDS[name]) if heading_of(option) == "Options"] == []
    text = help_of(COMMANDS[name], name)
    wide = [line for line in text.splitlines() if len(line) > 80 and "|" not in line]  # choices can't be broken
    assert wide == []


@pytest.mark.parametrize("arguments", [[], ["log"], ["quarantine"]], ids=" ".join)
def test_a_list_of_commands_has_one_whole_line_for_each(arguments: list[str]) -> None:
    text = CliRunner().invoke(ctl, [*arguments, "--help"], prog_name="gem-ctl", terminal_width=80).output
    lines = text.partition("\nCommands:\n")[2].splitlines()
    assert lines
    assert all(re.fullmatch(r"  [a-z]+ +[A-Z].*\.", line) and "..." not in line for line in lines), text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_whole_number_is_called_so_in_help_and_errors(name: str) -> None:
    """Not an "integer range", as click calls it."""
    whole = [each for each in all_options(COMMANDS[name]) if isinstance(each.type, click.IntRange | type(click.INT))]
    assert whole
    for each in whole:
        with pytest.raises(click.BadParameter, match=r"'1\.5' is not a valid whole number"):
            each.type.convert("1.5", each, None)
    assert "INTEGER" not in help_of(COMMANDS[name], name)


LOGGING = {name: COMMANDS[name] for name in ("gem-server", "gem-worker", "gem-evaluator")}


@pytest.mark.parametrize("name", LOGGING)
def test_every_command_that_logs_writes_the_lines_that_the_user_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def configured(*settings: str) -> NoReturn:
        raise RuntimeError(settings)

    monkeypatch.setattr(logs, "configure", configured)
    for module in ("gem_worker.process.cli", "gem_worker.evaluation.evaluator"):
        monkeypatch.setattr(f"{module}.stop_on_signals", lambda: None)
    for given, level in (([], "info"), (["--log-level", "error"], "error")):
        error = CliRunner().invoke(LOGGING[name], given, env={"GEM_LOG_FORMAT": "json"}).exception
        assert error is not None
        assert error.args == (("json", level),)


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_less_important_lines_are_left_out(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        logger = logs.configure("json", level)
        for each in LOG_LEVELS:
            getattr(logger, each)("said")
    finally:
        structlog.configure(**before)
    lines = [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()]
    assert lines == list(LOG_LEVELS[LOG_LEVELS.index(level) :])


# What a command imports that takes long.
HEAVY = {
    "gem_server.cli": "numba", "gem_worker.process.cli": "torch", "gem_worker.evaluation.evaluator": "torch",
    "gem_worker.launcher.cli": "torch",
}  # fmt: skip


def test_a_command_that_only_says_something_about_itself_or_an_option_imports_nothing_that_takes_long() -> None:
    """One process for all commands: what one of them imports, none may. The server itself never needs PyTorch."""
    program = f"""
import contextlib, importlib, os, sys
for module in {[*HEAVY, "gem_ctl.cli"]!r}:
    main = importlib.import_module(module).main
    for arguments in (["--version"], ["--help"], ["--no-such-option"], ["--steps", "many"], ["--task", "digit"]):
        if (module, arguments) == ("gem_ctl.cli", ["--help"]):
            continue  # it loads the commands of gem_server, to list them
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            with contextlib.suppress(SystemExit):
                main(arguments)
    print(module, *({{"torch", "numba", "ray"}} & sys.modules.keys()))
importlib.import_module("gem_server.server"), importlib.import_module("gem_client")  # with what their dependencies drag in
print("server", *({{"torch", "ray"}} & sys.modules.keys()))
"""
    done = python("-c", program)
    assert done.stdout.split() == [*HEAVY, "gem_ctl.cli", "server"], done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("module", HEAVY)
def test_usr1_prints_all_stacks_and_ends_nothing_even_while_the_command_is_imported(module: str) -> None:
    """The signal comes as the long import begins, the earliest moment that matters; what is registered stays."""
    program = f"""
import importlib, os, signal, sys, threading
class Signalling:
    def find_spec(self, name, *_):
        if name == {HEAVY[module]!r}:
            os.kill(os.getpid(), signal.SIGUSR1)
            print("alive", flush=True)
            os._exit(0)
sys.meta_path.insert(0, Signalling())
threading.Thread(target=threading.Event().wait, daemon=True).start()
importlib.import_module({module!r}).main([])
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert len(re.findall(r"^(?:Current thread|Thread) 0x", done.stderr, re.MULTILINE)) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "library", "arguments"),
    [*((script, "click", ["--version"]) for script in COMMANDS), ("gem-server", "numba", []), ("gem-train", "torch", [])],
)
def test_ctrl_c_while_a_command_is_imported_ends_it_with_130_and_no_word(
    script: str, library: str, arguments: list[str]
) -> None:
    """The signal comes as the first library of others' begins, or the one that takes longest."""
    module, _, function = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"][script].partition(":")
    program = f"""
import os, signal, sys
sys.argv = [{script!r}, *{arguments!r}]
class Signalling:
    def find_spec(self, name, *_):
        if name == {library!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Signalling())
from {module} import {function}
{function}()
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    if not arguments:
        return
    undisturbed = program.replace("os.kill(os.getpid(), signal.SIGINT)", "pass")
    plain = python("-c", undisturbed)
    assert (plain.returncode, plain.stdout.split()[0]) == (0, f"{script},"), plain.stderr


def test_gem_ctl_prints_its_stacks_too(capfd: pytest.CaptureFixture[str]) -> None:
    faulthandler.unregister(signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # or a failure would end the tests
    CliRunner().invoke(ctl, ["quarantine", "--help"])
    os.kill(os.getpid(), signal.SIGUSR1)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert "test_gem_ctl_prints_its_stacks_too" in capfd.readouterr().err


def test_a_variable_means_the_same_to_every_command() -> None:
    meanings: dict[str, set[str]] = defaultdict(set)
    listens: dict[str, list[str]] = defaultdict(list)
    for name, command in COMMANDS.items():
        for param in command.params:
            meanings[key(param)].add(param.type.name)
            if str(param.name).endswith("listen"):
                listens[key(param)].append(name)
    assert {name: kinds for name, kinds in meanings.items() if len(kinds) > 1} == {}
    assert all(len(names) == 1 for names in listens.values()), listens  # two processes can't have one address


def test_a_servers_switch_in_the_environment_names_no_run_to_resume(tmp_path: Path) -> None:
    for given, resumed in [("true", None), (str(tmp_path), tmp_path)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEM_RESUME", given)
            context = train.make_context("gem-train", [])
        assert context.params["resume"] == resumed
    with pytest.raises(click.UsageError, match="does not exist"):
        train.make_context("gem-train", ["--resume", "true"])


def test_a_workers_own_metrics_address_wins_over_the_one_it_may_share_with_a_server() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEM_METRICS_LISTEN", "127.0.0.1:1")
        assert worker.make_context("gem-worker", []).params["metrics_listen"] == "127.0.0.1:1"
        patch.setenv("GEM_WORKER_METRICS_LISTEN", "127.0.0.1:2")
        assert worker.make_context("gem-worker", []).params["metrics_listen"] == "127.0.0.1:2"
        assert server.make_context("gem-server", []).params["metrics_listen"] == "127.0.0.1:1"


def documented() -> dict[str, set[int]]:
    """The exit statuses of each command, as the table in docs/guides/operating.md has them."""
    header, _, *rows = re.findall(r"^\|.*\|$", OPERATING.read_text().partition("## Exit statuses")[2].partition("\n#")[0], re.M)
    names = re.findall(r"`(gem-\w+)`", header)
    table: dict[str, set[int]] = {name: set() for name in names}
    for row in rows:
        status, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for name, cell in zip(names, cells, strict=True):
            table[name] |= {int(status)} if cell else set()
    return table


def test_the_exit_statuses_are_those_of_the_help_and_of_the_code() -> None:
    table = documented()
    assert table.keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        (paragraph,) = re.findall(r"Exit status[^:]*: (.*?)\n *\n", help_of(command, name), re.DOTALL)
        told = re.findall(r"(?:^|; )(\d+) ", " ".join(paragraph.split()))
        assert {int(status) for status in told} == table[name], name
    own = {status for constant, status in vars(worker_statuses).items() if constant.startswith("EXIT_")}
    assert table["gem-worker"] == {0} | own
