"""Writes the tables of docs/settings.md and docs/rules.md, from the rows of `gem_api.process.settings` and `gem_api.rules`.

With --check, writes nothing and fails if a page is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS
from gem_api.process.settings import KEYS, Command, Setting, settings_of
from gem_api.rules import PROXIES, RULES

DOCS = Path(__file__).parent
COMMANDS: tuple[Command, ...] = ("server", "train", "worker", "evaluator", "ctl")
_BLOCK = re.compile(r"(<!-- \[tables: written by docs/generate\.py\] -->\n).*?(<!-- \[end\] -->)", re.DOTALL)


def settings() -> str:
    """The tables of docs/settings.md."""
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
    return [_row(key, {each: settings_of(each)[key] for each in COMMANDS if key in settings_of(each)}) for key in KEYS]


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


def rules(page: str) -> str:
    """The table of docs/rules.md, which is this page."""
    rows = RULES | {f"gem:proxy={name}": row for name, row in PROXIES.items() if row != RULES["gem"]}
    lines = ["| Rule | Takes | Each worker | All workers | A commit | Several servers |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        headings = ["Proxies"] if ":" in name else re.findall(rf"^## (.*\b{name}\b.*)$", page, re.MULTILINE)
        if not headings:
            sys.exit(f"docs/rules.md has no section for the rule {name}: write one, with the name in its heading")
        kept = [_arrays(row.each), _arrays(row.shared)]
        link = f"[`{name}`](#{headings[0].lower().replace(' ', '-')})"
        lines.append(f"| {link} | {row.kind} | {' | '.join(kept)} | {row.temporaries} | {'yes' if row.by_element else 'no'} |")
    return "\n".join([*lines, ""])


def _arrays(names: tuple[str, ...]) -> str:
    return f"{names[0]} … {names[-1]}" if len(names) > 3 else ", ".join(names) or "–"


def pages() -> dict[Path, str]:
    """The pages with their tables."""
    texts = {path: path.read_text(encoding="utf-8") for path in (DOCS / "settings.md", DOCS / "rules.md")}
    tables = [settings(), rules(texts[DOCS / "rules.md"])]
    return {
        path: _BLOCK.sub(lambda block, table=table: f"{block[1]}\n{table}\n{block[2]}", text)
        for (path, text), table in zip(texts.items(), tables, strict=True)
    }


def main(arguments: list[str]) -> int:
    changed = {path: text for path, text in pages().items() if text != path.read_text(encoding="utf-8")}
    for path, text in changed.items():
        if arguments == ["--check"]:
            print(f"docs/{path.name} does not list the settings or rules that there are: run make settings", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(bool(changed) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
