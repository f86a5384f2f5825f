"""Writes the tables of docs/settings.md: every setting, from the commands' own declarations.

With --check, writes nothing and fails if the page is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
from gem_api.hyperparameters import DECLARATIONS, DEFAULTS
from gem_api.process.settings_file import key
from gem_ctl.cli import main as ctl
from gem_server.cli import main as server
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.launcher.cli import main as train
from gem_worker.process.cli import main as worker

PAGE = Path(__file__).parent / "settings.md"
COMMANDS = {"server": server, "train": train, "worker": worker, "evaluator": evaluator, "ctl": ctl}
_BLOCK = re.compile(r"(<!-- \[tables: written by docs/generate\.py\] -->\n).*?(<!-- \[end\] -->)", re.DOTALL)
# Found out by the command, or different in each: the text says which.
_NO_DEFAULT = {"config", "version"}


def tables() -> str:
    """The page's tables."""
    rows = _rows()
    options = [row for row in rows if row[1]]
    others = [row for row in rows if not row[1]]
    return "\n".join([
        "## Settings of the rule gem and of schedules", "", *_of_names(), "",
        "## Settings that are options", "",
        "| Key | Option | Commands | Default | |", "|---|---|---|---|---|", *map(_line, options), "",
        "## Settings without an option", "",
        "| Key | Commands | Default | |", "|---|---|---|---|", *(_line((row[0], None, *row[2:])) for row in others), "",
    ])  # fmt: skip


def _of_names() -> list[str]:
    lines = ["| Option | Key | Default | |", "|---|---|---|---|"]
    for name, declared in DECLARATIONS.items():
        if declared.option and declared.key:
            default = [f"{DEFAULTS[name]}", *(f"{value:g} with {word}" for (_, word), value in declared.other_defaults.items())]
            lines.append(f"| `--{declared.option}` | `{declared.key}` | {'; '.join(default)} | {_cell(declared.help)} |")
    return lines


def _rows() -> list[tuple[str, str | None, str, str, str]]:
    """Key, option, commands, default and help of each setting, by its key."""
    found: dict[str, dict[str, click.Parameter]] = {}
    for name, command in COMMANDS.items():
        for param in command.params:
            if param.name not in _NO_DEFAULT:
                found.setdefault(key(param), {})[name] = param
    return [_row(name, params) for name, params in sorted(found.items())]


def _row(name: str, params: dict[str, click.Parameter]) -> tuple[str, str | None, str, str, str]:
    first = next(iter(params.values()))
    with_option = {who: param.opts[0] for who, param in params.items() if param.opts}
    option = f"`{next(iter(with_option.values()))}`" if with_option else None
    if option and len(with_option) < len(params):
        option += f" of {', '.join(with_option)}"
    defaults = {who: _default(param) for who, param in params.items()}
    same = len(set(defaults.values())) == 1
    default = next(iter(defaults.values())) if same else "; ".join(f"{who}: {each}" for who, each in defaults.items())
    return name, option, ", ".join(params), default, first.help or ""


def _default(param: click.Parameter) -> str:
    shown = getattr(param, "show_default", None)
    if isinstance(shown, str):
        return shown
    value = param.default
    if value is None or callable(value) or value == "" or "UNSET" in repr(value):
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(row: tuple[str, str | None, str, str, str]) -> str:
    name, option, commands, default, text = row
    shown = "" if option is None else f" {option} |"
    return f"| `{name}` |{shown} {commands} | {_cell(default)} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def page() -> str:
    """The page with its tables."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{tables()}\n{block[2]}", PAGE.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    text = page()
    if arguments == ["--check"]:
        if text != PAGE.read_text(encoding="utf-8"):
            print("docs/settings.md does not list the commands' settings: run python docs/generate.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
