"""Every command line of every page names commands, options, targets, modules, services and variables that exist."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise

import click
import pytest
import yaml
from click.testing import CliRunner
from gem_api.process.settings_file import key
from kit.commands import COMMANDS, with_subcommands
from kit.pages import ROOT, Block, blocks, pages

SETTING = re.compile(r"^(\w+)=")


def lines(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block, without comments; a line is split at pipes, `&&` and `;`.

    If a block has prompts (`$ `), its other lines are output.
    """
    text = block.text.splitlines()
    for line in [line for line in text if line.lstrip().startswith("$ ")] or text:
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help", "-h"}


def all_commands() -> list[click.Command]:
    return [each for command in COMMANDS.values() for each in with_subcommands(command)]


def variables() -> set[str]:
    """Every environment variable that a command or the compose files read."""
    names: set[str] = set()
    for parameter in (parameter for command in all_commands() for parameter in command.params):
        names.add(f"GEM_{key(parameter).upper()}")
        names.update(parameter.envvar if isinstance(parameter.envvar, list) else [])
    for page in [".env.example", "docker-compose.yml", "deploy/Dockerfile"]:
        names.update(re.findall(r"\b(GEM_\w+)", (ROOT / page).read_text(encoding="utf-8")))
    return names


def check_gem(words: list[str]) -> None:
    """Parses a line as the command itself does, but for files and values, which need not exist here."""
    command = COMMANDS[words[0]]
    rest = words[1:]
    while isinstance(command, click.Group):
        known = options(command)
        while rest and rest[0].startswith("-"):
            assert rest[0].partition("=")[0] in known, f"{words[0]} has no option {rest[0]}"
            flags = {name for p in command.params if getattr(p, "is_flag", False) for name in p.opts} | {"-h", "--help"}
            alone = rest[0] in flags or "=" in rest[0]
            rest = rest[1 if alone else 2 :]
        if not rest:
            return
        subcommand = command.get_command(click.Context(command), rest[0])
        assert subcommand is not None, f"{words[0]} has no command {rest[0]}"
        command, rest = subcommand, rest[1:]
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in options(command), f"{words[0]} has no option {word}"
    context = click.Context(command, info_name=words[0], resilient_parsing=True)
    command.make_parser(context).parse_args(args=list(rest))


def check(words: list[str]) -> None:
    """Fails if a command line names something that does not exist."""
    while words and (setting := SETTING.match(words[0])):
        if setting[1].startswith("GEM_"):
            assert setting[1] in variables(), f"no command reads {setting[1]}"
        words = words[1:]
    while words and re.fullmatch(r"[<>&\d]*>[&\d]*|\d?>.*", words[-1]):
        words = words[:-1]
    if not words:
        return
    name = words[0].removeprefix(".venv/bin/")
    if name in COMMANDS:
        redirected = next((i for i, word in enumerate(words) if word.startswith((">", "<"))), len(words))
        check_gem([name, *words[1:redirected]])
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        for word in words[1:]:
            assert SETTING.match(word) or word in targets, f"make has no target {word}"
    elif name.startswith("python") and "-m" in words:
        module = words[words.index("-m") + 1]
        assert find_spec(module) is not None, f"no module {module}"
    elif words[:2] == ["docker", "compose"]:
        check_compose(words[2:])


def check_compose(words: list[str]) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for option, value in pairwise(words):
        if option == "-f":
            assert (ROOT / value).exists(), f"no file {value}"
        if option == "--scale":
            assert value.partition("=")[0] in services, f"no service {value}"
    for command in COMMANDS:
        if command in words:
            check([*words[words.index(command) :]])
    if words[0] in ("exec", "stop", "restart"):
        service = next((word for word in words[1:] if not word.startswith("-")), None)
        assert service in services, f"no service in: docker compose {' '.join(words)}"


@pytest.mark.parametrize("block", [*blocks(language=""), *blocks(language="sh")], ids=str)
def test_every_command_line_names_what_exists(block: Block) -> None:
    for words in lines(block):
        check(words)


PLANS = [block for block in blocks(language="") if block.text.lstrip().startswith("$ gem-ctl plan")]


@pytest.mark.parametrize("block", PLANS, ids=str)
def test_gem_ctl_plan_prints_what_a_page_shows(block: Block) -> None:
    line, _, shown = textwrap.dedent(block.text).partition("\n")
    assert CliRunner().invoke(COMMANDS["gem-ctl"], shlex.split(line)[2:]).output == shown


def test_a_page_shows_a_plan() -> None:
    assert "costs.md" in {block.page.name for block in PLANS}


def test_the_options_that_pages_quote_exist() -> None:
    """`--flag` between backticks, on any page of docs/guides and in the README."""
    known = {option for command in all_commands() for option in options(command)}
    known |= {"--scale", "--build", "--volumes", "--seeds", "--tls-…"}  # of docker compose and benchmarks
    known |= {"--export", "--interface", "--nodelist"}  # of Slurm and its script
    for page in [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md"))]:
        quoted = re.findall(r"`(?:gem-\w+ )?(--[\w-]+)", page.read_text(encoding="utf-8"))
        assert set(quoted) <= known, f"{page.name}: {sorted(set(quoted) - known)}"


def test_the_modules_that_pages_quote_exist() -> None:
    """`python -m module`, on any page but the changelog, which tells of the past."""
    for page in pages():
        if page.name != "CHANGELOG.md":
            for module in re.findall(r"python -m ([\w.]+)", page.read_text(encoding="utf-8")):
                assert find_spec(module) is not None, f"{page.relative_to(ROOT)}: no module {module}"
