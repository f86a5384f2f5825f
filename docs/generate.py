"""Writes the tables of docs/settings.md: every setting, from the rows of `gem_api.process.settings`.

With --check, writes nothing and fails if the page is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS
from gem_api.process.settings import KEYS, Command, Setting, settings_of

PAGE = Path(__file__).parent / "settings.md"
COMMANDS: tuple[Command, ...] = ("server", "train", "worker", "evaluator", "ctl")
_BLOCK = re.compile(r"(<!-- \[tables: written by docs/generate\.py\] -->\n).*?(<!-- \[end\] -->)", re.DOTALL)


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
    return [_row(key, {each: settings_of(each)[key] for each in COMMANDS if key in settings_of(each)}) for key in sorted(KEYS)]


def _row(key: str, rows: dict[Command, Setting]) -> tuple[str, str | None, str, str, str]:
    with_option = {command: row.option.partition("/")[0] for command, row in rows.items() if row.option}
    option = f"`{next(iter(with_option.values()))}`" if with_option else None
    if option and len(with_option) < len(rows):
        option += f" of {', '.join(with_option)}"
    defaults = {command: _default(row) for command, row in rows.items()}
    same = len(set(defaults.values())) == 1
    default = next(iter(defaults.values())) if same else "; ".join(f"{who}: {each}" for who, each in defaults.items())
    return key, option, ", ".join(rows), default, next(iter(rows.values())).help


def _default(row: Setting) -> str:
    if row.shown_default or row.default in (None, "", ()):
        return row.shown_default or "–"
    return str(row.default).lower() if isinstance(row.default, bool) else str(row.default)


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
