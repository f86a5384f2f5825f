"""The update rules, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from gem_server.rules.base import PiFacts, UpdateRule
from gem_server.rules.gem import Gem
from gem_server.rules.plain import Adaptive, Downpour

RULES: dict[str, type[Gem] | type[Downpour]] = {rule.name: rule for rule in (Gem, Downpour, Adaptive)}

__all__ = ["RULES", "PiFacts", "UpdateRule", "make_rule"]


def make_rule(name: str, **settings: Any) -> UpdateRule:
    """The rule of that name with those of the settings that it has. Raises ValueError for what it cannot take."""
    if name not in RULES:
        raise ValueError(f"no rule is named {name!r}: choose from {', '.join(RULES)}")
    kind = RULES[name]
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in settings.items() if key in known})
