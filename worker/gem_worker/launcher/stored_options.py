"""Reads the options of a run back, to resume it."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from gem_api.hyperparameters import DECLARATIONS, require_valid

# What JSON has for an option of these types; for all others, text.
_KINDS = ((click.IntRange, (int,)), (click.FloatRange, (int, float)), (click.types.BoolParamType, (bool,)))

_SWITCHES = ("1", "0", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n")


class RunToResume(click.Path):
    """The folder of a run. Ignores GEM_RESUME=true, which is meant for a gem-server with the same environment."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        by_variable = ctx and param and param.name and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
        if by_variable and str(value).lower() in _SWITCHES:
            return None
        return super().convert(value, param, ctx)


def stored_options(path: Path) -> dict[str, Any]:
    """The options in a run.json. Raises OSError or RecursionError, or ValueError if one is of the wrong kind or out of range.

    Null is right only for an option without a default."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a file")
    stored = json.loads(path.read_text())
    if not isinstance(stored, dict):
        raise ValueError(f"{path.name} holds no options")
    for name in [name for name, declared in DECLARATIONS.items() if declared.option and name in stored]:
        try:
            require_valid(name, stored[name])
        except ValueError as error:
            raise ValueError(f"{path.name} has a wrong {name}: {error}") from error
    context = click.get_current_context()
    for param in context.command.params:
        if param.name not in stored or ((value := stored[param.name]) is None and not _has_default(param, context)):
            continue
        wanted = next((kinds for known, kinds in _KINDS if isinstance(param.type, known)), (str,))
        if type(value) not in wanted:
            raise ValueError(f"{path.name} has {param.name} {reprlib.repr(value)}")
        if isinstance(param.type, click.IntRange | click.FloatRange):
            try:
                param.type.convert(value, param, context)
            except click.BadParameter as error:
                raise ValueError(f"{path.name} has a wrong {param.name}: {error.message}") from error
    return stored


def _has_default(param: click.Parameter, context: click.Context) -> bool:
    return isinstance(param.get_default(context), (str, int, float, Path))
