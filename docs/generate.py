"""Writes the tables of docs/settings.md and the list of docs/rules.md, from `gem_api.process.settings` and `gem_api.rules`.

With --check, writes nothing and fails if a page is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gem_api.hyperparameters import DECLARATIONS, flag
from gem_api.process.settings import KEYS, Command, Setting, defaults_of, settings_of
from gem_api.rules import PROXIES, RULES

DOCS = Path(__file__).parent
COMMANDS: tuple[Command, ...] = ("server", "train", "worker", "evaluator", "ctl")
_BLOCK = re.compile(r"(<!-- \[tables: written by docs/generate\.py\] -->\n).*?(<!-- \[end\] -->)", re.DOTALL)


def settings() -> str:
    """The tables of docs/settings.md."""
    rows = [_row(key, {each: settings_of(each)[key] for each in COMMANDS if key in settings_of(each)}) for key in KEYS]
    options = [row for row in rows if row.startswith("| `--")]
    return "\n".join([
        "## Settings of the rule gem and of schedules", "", *_of_names(), "",
        "## Settings that are options", "",
        "| Option | Commands | Default | |", "|---|---|---|---|", *options, "",
        "## Settings without an option", "",
        "| Key | Commands | Default | |", "|---|---|---|---|", *(row for row in rows if row not in options), "",
    ])  # fmt: skip


def _of_names() -> list[str]:
    settings = {name: each for name, each in DECLARATIONS.items() if each.option and each.key}
    rows = [f"| `{flag(name)}` | {defaults_of(name)} | {_cell(each.help)} |" for name, each in settings.items()]
    return ["| Setting | Default | |", "|---|---|---|", *rows]


def _row(key: str, rows: dict[Command, Setting]) -> str:
    """The line of a setting: its option, else its key; both if they differ, or some commands have no option for it."""
    with_option = {command: row.option.partition("/")[0] for command, row in rows.items() if row.option}
    name = f"`{next(iter(with_option.values()), key)}`"
    if with_option and (len(with_option) < len(rows) or name != f"`--{key.replace('_', '-')}`"):
        name += f" of {', '.join(with_option)} (key `{key}`)"
    defaults: dict[str, list[str]] = {}  # the commands that have each
    for command, row in rows.items():
        defaults.setdefault(_default(row), []).append(command)
    default = "; ".join(f"{', '.join(who)}: {each}" if len(defaults) > 1 else each for each, who in defaults.items())
    return f"| {name} | {', '.join(rows)} | {_cell(default)} | {_cell(next(iter(rows.values())).help)} |"


def _default(row: Setting) -> str:
    if row.shown_default or row.default in (None, "", ()):
        return row.shown_default or "–"
    return str(row.default).lower() if isinstance(row.default, bool) else str(row.default)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def rules(page: str) -> str:
    """The list of the rules in docs/rules.md, which is this page."""
    rows = RULES | {f"gem:proxy={name}": row for name, row in PROXIES.items() if row != RULES["gem"]}
    lines = []
    for name, row in rows.items():
        headings = ["Proxies"] if ":" in name else re.findall(rf"^## (.*\b{name}\b.*)$", page, re.MULTILINE)
        if not headings:
            sys.exit(f"docs/rules.md has no section for the rule {name}: write one, with the name in its heading")
        arrays = f"{len(row.each)}/{len(row.shared)}/{row.temporaries}"
        link = f"[`{name}`](#{headings[0].lower().replace(' ', '-')})"
        lines.append(f"- {link}: {row.kind}, {arrays}{'' if row.by_element else ', one server'}")
    return "\n".join([*lines, ""])


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
