"""The options that take a name and its settings: --rule, --optimizer and --schedule.

Their text is NAME, or NAME:KEY=VALUE,KEY=VALUE, such as "gem:kappa=2,momentum=0.9". A user's own rule has a colon in its name,
"module:Class:alpha=1": the settings begin after the last colon before the first "=".
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, SCHEDULES, Hyperparameters, require_valid
from gem_api.rules import OPTIMIZERS, RULES

NAMES = {"rule": tuple(RULES), "optimizer": tuple(OPTIMIZERS), "schedule": SCHEDULES}


def parse(option: str, value: str | Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a value of an option sets, by their names.

    Args:
        option: A key of NAMES.
        value: The text, or a table: {"name": "gem", "kappa": 2}.

    Raises:
        ValueError: The name or a setting is unknown or invalid. The server knows more of the rules' settings than this
            function, and checks those later.
    """
    name, settings = _split(option, value) if isinstance(value, str) else _from_table(option, value)
    if name not in NAMES[option] and not (option == "rule" and ":" in name):
        own = ", or your own as module:Class" if option == "rule" else ""
        raise ValueError(
            f"unknown {option} {name!r}{nearest(name, NAMES[option])}: choose from {', '.join(NAMES[option])}{own}"
        )
    declared, rest = _declared(option, name), f"{option}_options"
    if rest not in DECLARATIONS and (unknown := [key for key in settings if key not in declared]):
        raise ValueError(unknown_setting(f"{option} {name}", unknown[0], declared))
    set_ = {declared[key]: _converted(declared[key], text) for key, text in settings.items() if key in declared}
    others = " ".join(f"{key}={text}" for key, text in settings.items() if key not in declared)
    return {option: name} | set_ | ({rest: others} if others else {})


_OPTIONS = {"lr": "--learning-rate", "learning_rate": "--learning-rate", "weight_decay": "--weight-decay"}


def written(hyperparameters: Hyperparameters) -> dict[str, str]:
    """The text of each option that `parse` turns into these hyper-parameters."""
    values = vars(hyperparameters)
    return {option: _written(option, values) for option in NAMES}


def unknown_setting(what: str, key: str, valid: Collection[str]) -> str:
    """The line that says that a rule, optimizer or schedule has no such setting, and which it has."""
    if option := _OPTIONS.get(key):
        return f"{what} has no setting {key!r}: that is the option {option}"
    known = f"its settings are {', '.join(valid)}" if valid else "it has no settings"
    return f"{what} has no setting {key!r}{nearest(key, valid)}: {known}"


def nearest(word: str, known: Collection[str]) -> str:
    """ " (did you mean X?)", for a word that is not among those known; empty if none is like it, in any case."""
    by_lower_case = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return f" (did you mean {by_lower_case[found[0]]}?)" if found else ""


def _written(option: str, values: Mapping[str, Any]) -> str:
    settings = [f"{key}={values[name]}" for key, name in _declared(option, values[option]).items()]
    settings += values.get(f"{option}_options", "").split()
    return f"{values[option]}:{','.join(settings)}" if settings else str(values[option])


def _declared(option: str, name: str) -> dict[str, str]:
    """The hyper-parameters that are settings of this name, by their keys. Those of rules are declared for gem alone."""
    if option == "rule" and name != "gem":
        return {}
    return {each.key: hyper for hyper, each in DECLARATIONS.items() if each.option == option and each.key}


def _split(option: str, text: str) -> tuple[str, dict[str, str]]:
    """A text's name, and its settings as texts."""
    head, equals, _ = text.partition("=")
    if not equals:
        name, _, key = text.partition(":")
        if key and name in NAMES[option]:
            raise ValueError(f"the setting {key!r} has no value: write {name}:{key}=VALUE")
        return text, {}
    name, colon, _ = head.rpartition(":")
    if not colon:
        raise ValueError(f"{text!r} has no name: write NAME:KEY=VALUE,...")
    settings: dict[str, str] = {}
    for setting in text[len(name) + 1 :].split(","):
        key, _, value = setting.partition("=")
        _add(settings, key.strip(), value.strip())
    return name.strip(), settings


def _from_table(option: str, table: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The same from a table of TOML."""
    if not isinstance(name := table.get("name"), str):
        raise ValueError(f'the table has no name: write {option} = {{ name = "{NAMES[option][0]}", KEY = VALUE }}')
    settings: dict[str, str] = {}
    for key, value in table.items():
        if key != "name":
            _add(settings, key, str(value).lower() if isinstance(value, bool) else str(value))
    return name, settings


def _add(settings: dict[str, str], key: str, value: str) -> None:
    if not key or not value or set(" ,") & set(value):
        raise ValueError(f"the setting {key!r} has no value, or one with a space or a comma: write NAME:KEY=VALUE,KEY=VALUE")
    if key in settings:
        raise ValueError(f"the setting {key!r} is given twice")
    settings[key] = value


def _converted(name: str, text: str) -> Any:
    value: Any = text
    with suppress(ValueError):  # `require_valid` says what is right
        value = type(DEFAULTS[name])(text)
    require_valid(name, value)
    return value
