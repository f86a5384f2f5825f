"""Writes what the chart knows of the commands' settings: the schema of `config` in values.schema.json, and templates/_keys.tpl.

Every setting of gem-server, gem-worker and gem-evaluator is a key of `config`, but for those that the chart sets itself
because they depend on where a process runs.
With --check, writes nothing and fails if a file is not up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from gem_api.named_settings import NAMES
from gem_api.process.option_types import Bytes, Named, Times
from gem_api.process.settings import Command, Setting, settings_of

CHART = Path(__file__).parent / "gem"
COMPONENTS: tuple[Command, ...] = ("server", "worker", "evaluator")
_EXACT = (1 << 53) - 1  # Helm reads numbers as doubles
_WHOLE: dict[str, Any] = {"type": "integer"}
# `helm --set` takes decimals as text. Their range is then checked by the command.
_NUMBER = r"([0-9]+\.?|[0-9]*\.[0-9]+)([eE][-+]?[0-9]+)?"
_DECIMAL: dict[str, Any] = {"type": ["number", "string"], "pattern": f"^{_NUMBER}$"}


def settings(component: Command) -> dict[str, Setting]:
    """The settings of a component's command that users may set, by their keys."""
    return {key: row for key, row in sorted(settings_of(component).items()) if not row.by_deployment}


def schema() -> dict[str, Any]:
    """The JSON schema of `config`; unknown keys are refused."""
    known = {key: _type(row.type) for component in COMPONENTS for key, row in settings(component).items()}
    text = "Settings of the server, the workers and the evaluator, as docs/settings.md lists them."
    return {"description": text, "type": "object", "additionalProperties": False, "properties": dict(sorted(known.items()))}


def _type(kind: click.ParamType[Any]) -> dict[str, Any]:
    if isinstance(kind, Named):
        names = "|".join(NAMES[kind.option]) + (r"|[\w.]+:\w+" if kind.option == "rule" else "")
        return {"type": ["string", "object"], "pattern": rf"^({names})(:\w+=.*)?$"}
    if isinstance(kind, click.Choice):
        return {"enum": list(kind.choices)}
    if kind is click.BOOL:
        return {"type": "boolean"}
    if isinstance(kind, click.IntRange | click.FloatRange):
        whole = isinstance(kind, click.IntRange)
        low = {} if kind.min is None else {"exclusiveMinimum" if kind.min_open else "minimum": kind.min}
        top = kind.max if kind.max is not None or not whole else _EXACT
        high = {} if top is None else {"exclusiveMaximum" if kind.max_open else "maximum": min(top, _EXACT)}
        return (_WHOLE if whole else _DECIMAL) | low | high
    if isinstance(kind, Times):
        return {"type": ["number", "string"], "minimum": 0, "pattern": f"^{_NUMBER}(,{_NUMBER})*$"}
    if isinstance(kind, Bytes):
        return {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9.]+[KMGTkmgt]?[Ii]?[Bb]?$"}
    return {"type": "string"}


def values_schema() -> str:
    """values.schema.json with the schema of `config` replaced."""
    whole = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    whole["properties"]["config"] = schema()
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def keys() -> str:
    """templates/_keys.tpl: which settings a component's command reads, so that only a change of those replaces its pods."""
    lists = [
        f'{{{{- define "gem.keys.{name}" -}}}}\n{json.dumps(list(settings(name)))}\n{{{{- end -}}}}' for name in COMPONENTS
    ]
    return "{{/* Written by deploy/helm/generate.py. */}}\n" + "\n".join(lists) + "\n"


def files() -> dict[Path, str]:
    """What is to be written where."""
    return {CHART / "values.schema.json": values_schema(), CHART / "templates" / "_keys.tpl": keys()}


def main(arguments: list[str]) -> int:
    changed = {path: text for path, text in files().items() if text != path.read_text(encoding="utf-8")}
    for path, text in changed.items():
        if arguments == ["--check"]:
            print(f"{path.name} does not list the commands' settings: run make settings", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return int(bool(changed) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
