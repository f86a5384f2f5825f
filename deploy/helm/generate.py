"""Writes the options of the commands into the chart: `run` and three `options` in values.yaml and values.schema.json.

Every option of gem-server, gem-worker and gem-evaluator is a value of the chart, but for those that the chart sets itself
(OWN). The value's name is the option's variable in camel case: GEM_LEARNING_RATE is `learningRate`. With --check, writes
nothing and fails if a file is not up to date.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import click
from gem_api.hyperparameters import DECLARATIONS, RULES
from gem_api.process.options import RuleName
from gem_server.cli import main as server
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.process.cli import main as worker

CHART = Path(__file__).parent / "gem"
CREDENTIALS = {"token_file", "tls_ca", "tls_cert", "tls_key"}
# What the chart sets itself, from other values or because of where its containers run.
OWN = {
    "gem-server": {"listen", "lane_listen", "metrics_listen", "memory_socket", "resume", "checkpoint_dir", "tokens", "tls_cert",
                   "tls_key", "tls_client_ca", "range", "peers"},
    "gem-worker": {"task", "data", "name", "first_worker", "stopped_status", "server", "metrics_listen",
                   "shared_memory"} | CREDENTIALS,
    "gem-evaluator": {"task", "data", "once", "server"} | CREDENTIALS,
}  # fmt: skip
# Where the options stand in values.yaml, and the values that the chart sets by default.
PLACES: dict[str, dict[str, Any]] = {
    "run": {"epochs": 160},
    "server.options": {"durability": "log"},
    "worker.options": {"giveUpAfter": 3600},
    "evaluator.options": {},
}
# What a value's description says beyond the option's help.
MORE = {"history": "It must be under /checkpoints: the rest of the file system is read-only, or ends with the pod."}
_EXACT = (1 << 53) - 1  # Helm reads numbers as doubles
_WHOLE: dict[str, Any] = {"type": "integer"}
# `helm --set` takes decimals as text. Their range is then checked by the command.
_DECIMAL: dict[str, Any] = {"type": ["number", "string"], "pattern": r"^([0-9]+\.?|[0-9]*\.[0-9]+)([eE][-+]?[0-9]+)?$"}
_BEGIN, _END = "# [options of {}: written by deploy/helm/generate.py]", "# [end]"


def variable(option: click.Parameter) -> str:
    """The environment variable of an option."""
    named = [option.envvar] if isinstance(option.envvar, str) else option.envvar
    return named[0] if named else f"GEM_{(option.name or '').upper()}"


def key(option: click.Parameter) -> str:
    """The name of an option's value in the chart."""
    return _camel(variable(option).removeprefix("GEM_").lower().split("_"))


def options(place: str) -> list[click.Option]:
    """The options at a place of values.yaml."""
    command = {"run": server, "server": server, "worker": worker, "evaluator": evaluator}[place.partition(".")[0]]
    name = {"run": "gem-server"}.get(place, f"gem-{place.partition('.')[0]}")
    found = [each for each in command.params if isinstance(each, click.Option) and each.name not in OWN[name] | {"version"}]
    if command is server:
        of_the_run = DECLARATIONS.keys() | {"until_stopped"}
        found = [each for each in found if (each.name in of_the_run) == (place == "run")]
    return found


def schema(place: str) -> dict[str, Any]:
    """The JSON schema of a place; unknown names are refused."""
    known = {key(each): {"description": described(each), **_type(each)} for each in options(place)}
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(known.items()))}


def described(option: click.Option) -> str:
    """The option's help, with the chart's names for other options, and what the chart adds."""
    return " ".join([_renamed(option.help or ""), *([MORE[option.name]] if option.name in MORE else [])])


def _renamed(text: str) -> str:
    return re.sub(r"--([a-z][a-z-]*[a-z])", lambda flag: _camel(flag[1].split("-")), text)


def _camel(words: list[str]) -> str:
    return words[0] + "".join(word.capitalize() for word in words[1:])


def _type(option: click.Option) -> dict[str, Any]:
    kind = option.type
    if isinstance(kind, RuleName):
        return {"type": "string", "pattern": rf"^({'|'.join(RULES)}|[\w.]+:\w+)$"}
    if isinstance(kind, click.Choice):
        return {"enum": list(kind.choices)}
    if option.is_flag:
        return {"type": "boolean"}
    if isinstance(kind, click.IntRange | click.FloatRange):
        whole = isinstance(kind, click.IntRange)
        low = {} if kind.min is None else {"exclusiveMinimum" if kind.min_open else "minimum": kind.min}
        top = kind.max if kind.max is not None or not whole else _EXACT
        high = {} if top is None else {"exclusiveMaximum" if kind.max_open else "maximum": min(top, _EXACT)}
        return (_WHOLE if whole else _DECIMAL) | low | high
    if kind.name == "bytes":
        return {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9.]+[KMGTkmgt]?[Ii]?[Bb]?$"}
    return {"type": "string"}


def listing(place: str, indent: int) -> str:
    """The lines of values.yaml: what the chart sets, and every other option as a comment with its default."""
    ours = PLACES[place]
    order = list(DECLARATIONS) if place == "run" else []
    lines = [f"{place.rpartition('.')[2]}:" + ("" if ours else " {}")]
    for each in sorted(options(place), key=lambda option: (key(option) not in ours, *_place(option.name, order))):
        set_here = key(each) in ours
        shown = each.show_default if isinstance(each.show_default, str) and not set_here else ""
        text = described(each) + (f" Default: {_renamed(shown)}." if shown else "")
        wrapped = textwrap.wrap(text, 118 - indent, break_on_hyphens=False)
        lines += [f"  # {'-- ' * (i == 0)}{line}" for i, line in enumerate(wrapped)]
        lines.append(f"  {'' if set_here else '# '}{key(each)}: {json.dumps(ours.get(key(each), _default(each)))}")
    return textwrap.indent("\n".join(lines), " " * indent)


def _place(name: str | None, order: list[str]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name or "")


def _default(option: click.Option) -> Any:
    """The option's default; an example of the right type if it is found out at the start."""
    if option.type.name == "bytes":
        return "8G" if callable(option.default) else option.show_default
    if option.default is None and isinstance(option.type, click.IntRange):
        return 3
    return option.default if isinstance(option.default, str | int | float) else ""


def values(text: str) -> str:
    """values.yaml with its generated blocks replaced."""
    for place in PLACES:
        begin = _BEGIN.format(place)
        found = re.search(rf"^( *){re.escape(begin)}\n.*?^ *{re.escape(_END)}$", text, re.MULTILINE | re.DOTALL)
        if found is None:
            raise SystemExit(f"values.yaml has no line: {begin}")
        block = f"{found[1]}{begin}\n{listing(place, len(found[1]))}\n{found[1]}{_END}"
        text = text[: found.start()] + block + text[found.end() :]
    return text


def values_schema(text: str) -> str:
    """values.schema.json with the schemas of the options replaced."""
    whole = json.loads(text)
    for place in PLACES:
        *path, last = place.split(".")
        properties = whole["properties"]
        for name in path:
            properties = properties[name]["properties"]
        properties[last] = schema(place)
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def files() -> dict[Path, str]:
    """What is to be written where."""
    writers = {CHART / "values.yaml": values, CHART / "values.schema.json": values_schema}
    return {path: write(path.read_text(encoding="utf-8")) for path, write in writers.items()}


def main(arguments: list[str]) -> int:
    changed = {path: text for path, text in files().items() if path.read_text(encoding="utf-8") != text}
    if arguments == ["--check"]:
        for path in changed:
            print(f"{path.name} does not list the commands' options: run python deploy/helm/generate.py", file=sys.stderr)
        return int(bool(changed))
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
