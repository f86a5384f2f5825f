"""Makes a rule or an optimizer from its class and the user's settings."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

from gem_api.hyperparameters import DECLARATIONS
from gem_api.named_settings import unknown_setting

from gem_server.rules.base import UpdateRule

T = TypeVar("T")

_TYPES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
_TRUTH = {"true": True, "false": False}
_RULE_SETTINGS = frozenset(name for name, declared in DECLARATIONS.items() if declared.option == "rule" and declared.key)


def load(name: str) -> type[UpdateRule]:
    """A user's rule, "module:Class", from an installed package. Raises ValueError if it is missing or not a rule."""
    module, _, kind = name.partition(":")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module may raise anything
        what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"can't import {module!r} for rule {name!r}: {what} (it must be installed)") from error
    rule = getattr(found, kind, None)
    if rule is None:
        raise ValueError(f"module {module!r} has no class {kind!r}")
    if not (isinstance(rule, type) and issubclass(rule, UpdateRule) and "__dataclass_fields__" in vars(rule)):
        raise ValueError(
            f"{name!r} is not a rule: it must be a dataclass derived from gem_server.rules.ArrayRule or UpdateRule"
        )
    if missing := sorted(rule.__abstractmethods__):
        raise ValueError(f"{name!r} is not a rule: it lacks {', '.join(missing)}")
    return rule


def where_raised(rule: UpdateRule, error: Exception) -> str:
    """An exception, and the line of the rule's module that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == sys.modules[type(rule).__module__].__file__]
    last = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}, line {last.lineno})"


def make(kind: type[T], options: str, settings: Mapping[str, object], what: str = "rule") -> T:
    """An instance with its own `options`, and with the run's settings that it has fields for.

    Args:
        kind: A frozen dataclass.
        options: "name=value", separated by blanks, for the fields that are not among `settings`, and for those that only
            rules have, such as kappa.
        settings: The run's settings; those that it has no field for are ignored.
        what: What to call it in errors.

    Raises:
        ValueError: An option is unknown, missing or invalid.
    """
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    own = own_settings(kind, settings)
    types = _types(kind, own, what)
    given = {name: value for name, value in settings.items() if name in known}
    for option in options.split():
        name, equals, text = option.partition("=")
        if name not in own:
            raise ValueError(unknown_setting(f"the {what}", name, own))
        if not equals:
            raise ValueError(f"the {what}'s setting {name!r} has no value: write {name}=VALUE")
        given[name] = _value(name, text, types[name], what)
    if lacking := [name for name in own if name not in given and _required(known[name])]:
        raise ValueError(f"the {what} needs settings without a default: {', '.join(f'{name}=…' for name in lacking)}")
    return kind(**given)


def own_settings(kind: type, others: Collection[str] = DECLARATIONS.keys()) -> list[str]:
    """The settings of a rule or an optimizer itself: its fields, but for those among `others` that it shares with a run."""
    return [field.name for field in fields(kind) if field.name not in others or field.name in _RULE_SETTINGS]


def _types(kind: type, names: list[str], what: str) -> dict[str, type]:
    """The types of the options. Raises ValueError for a type that cannot be read from text."""
    types = get_type_hints(kind)
    if odd := [name for name in names if types[name] not in _TYPES]:
        valid = ", ".join(each.__name__ for each in _TYPES)
        raise ValueError(f"the {what}'s setting {odd[0]} must have one of the types {valid}")
    return {name: types[name] for name in names}


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _value(name: str, text: str, kind: type, what: str) -> Any:
    try:
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"the {what}'s setting {name} is {_TYPES[kind]}, not {text!r}") from None
