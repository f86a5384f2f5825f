"""The update rules, by name."""

from __future__ import annotations

from dataclasses import replace

from gem_api import rules as table
from gem_api.hyperparameters import Hyperparameters
from gem_api.rules import RuleRow
from gem_api.schedule import require_schedule

from gem_server.rules.aeasgd import Aeasgd
from gem_server.rules.average import AVERAGE
from gem_server.rules.base import ArrayRule, PiStatistics, RuleInput, Shared, UpdateRule, require_waiting, require_weighing
from gem_server.rules.dana import Dana
from gem_server.rules.dcasgd import DcAsgd
from gem_server.rules.diloco import DiLoCo
from gem_server.rules.fedasync import FedAsync
from gem_server.rules.fedbuff import FedBuff
from gem_server.rules.gem import Gem
from gem_server.rules.gem_ahead import GemAhead
from gem_server.rules.gradient_rule import GradientRule
from gem_server.rules.make import load, make, own_settings, where_raised
from gem_server.rules.optimizers import OPTIMIZERS
from gem_server.rules.plain import Adaptive, Agn, Downpour, Rescaled
from gem_server.rules.proxies import PROXIES
from gem_server.rules.ringmaster import Ringmaster

_CLASSES = (Gem, Downpour, Adaptive, Agn, Aeasgd, DcAsgd, FedAsync, FedBuff, Ringmaster, DiLoCo, Dana, Rescaled)
RULES: dict[str, type[UpdateRule]] = {kind.name: kind for kind in _CLASSES}

__all__ = [
    "RULES",
    "ArrayRule",
    "PiStatistics",
    "RuleInput",
    "Shared",
    "UpdateRule",
    "is_users",
    "make_rule",
    "require_named",
    "require_row",
    "rule_of",
    "where_raised",
]


_BUILT_IN = frozenset({GemAhead, *RULES.values()})
_PLAIN, _AHEAD = frozenset(own_settings(Gem)), frozenset(own_settings(GemAhead))
# What only the other of the two classes of rule gem has, and when the rule is of that class.
_GEMS_OTHER: dict[type[UpdateRule], tuple[frozenset[str], str]] = {
    Gem: (_AHEAD - _PLAIN, "only with an optimizer: add --optimizer adamw, say"),
    GemAhead: (_PLAIN - _AHEAD, "only with --optimizer sgd, the default"),
}


def is_users(rule: UpdateRule) -> bool:
    """Whether a rule is a user's own, which may raise an exception at any point."""
    return type(rule) not in _BUILT_IN


def make_rule(rule: str, rule_options: str = "", **settings: object) -> UpdateRule:
    """Makes the rule of that name, or a user's own as "module:Class".

    Args:
        rule: Its name.
        rule_options: Options of this rule alone: "name=value", separated by spaces.
        settings: The run's hyper-parameters. Those that the rule has no field for are ignored.

    Raises:
        ValueError: There is no such rule, or a value is invalid; the message names the valid ones.
    """
    optimizer = settings.get("optimizer", "sgd")
    kind = GemAhead if rule == Gem.name and optimizer != "sgd" else RULES.get(rule) or _users(rule)
    others, when = _GEMS_OTHER.get(kind, (frozenset(), ""))
    if lacking := [name for name in _names(rule_options) if name in others]:
        raise ValueError(f"rule gem has the setting {lacking[0]!r} {when}")
    made = make(kind, rule_options, settings)
    takes_it = isinstance(made, GradientRule) or (optimizer == "worker" and made.kind == "delta")
    if optimizer != "sgd" and not takes_it:
        raise ValueError(f"rule {rule} can't apply --optimizer {optimizer}: use gem, downpour or adaptive")
    return made


def _names(options: str) -> list[str]:
    """The names of the settings in an option's text."""
    return [option.partition("=")[0] for option in options.split()]


def _users(rule: str) -> type[UpdateRule]:
    """A user's rule. Raises ValueError if it can't be loaded."""
    if ":" not in rule:
        raise ValueError(f"no rule is named {rule!r}: choose from {', '.join(RULES)}, or name your own as module:Class")
    return load(rule)


def require_named(kept: str, asked: str | None) -> None:
    """Raises ValueError if a checkpoint names a user's rule and `--rule` does not: code is loaded only if the user names it."""
    if kept not in RULES and kept != asked:
        raise ValueError(f"the run's rule is {kept!r}, not a built-in rule: give --rule {kept} to load its code")


def rule_of(settings: Hyperparameters) -> UpdateRule:
    """The rule that a run's hyper-parameters name. Raises ValueError as `make_rule`, for an invalid schedule, and if it can't
    count commits by their shares of a batch, let replies wait, or have its θ averaged, as they ask for."""
    require_schedule(settings)
    rule = make_rule(**vars(settings))
    require_weighing(rule, settings)
    require_waiting(rule, settings)
    if settings.average and AVERAGE in rule.shared:
        raise ValueError(
            f"rule {settings.rule} keeps an array named {AVERAGE!r}, as --average does: give the rule's another name"
        )
    return rule


def require_row(row: RuleRow, rule: UpdateRule, name: str) -> None:
    """Raises TypeError if a built-in rule is not what a row of `gem_api.rules` says."""
    found = replace(
        row, kind=rule.kind, each=rule.buffers, shared=rule.shared, temporaries=rule.temporaries, by_element=rule.by_element,
        reads_once=rule.reads_once, settings=row.settings if isinstance(rule, GemAhead) else tuple(own_settings(type(rule))),
    )  # fmt: skip
    if found != row:
        raise TypeError(f"the class of rule {name} says {found}, but gem_api.rules {row}: correct one of them")


def _require_rows() -> None:
    """Raises TypeError or KeyError if a class has no row, a row no class, or they differ."""
    for name in RULES.keys() | table.RULES.keys():
        require_row(table.RULES[name], make_rule(name), name)
        if table.RULES[name].optimizers:
            require_row(table.row_of(name, "momentum", "adam"), make_rule(name, optimizer="adam"), f"{name} with adam")
    for proxy in PROXIES.keys() | table.PROXIES.keys():
        require_row(table.PROXIES[proxy], make_rule("gem", f"proxy={proxy}"), f"gem:proxy={proxy}")
    if (found := {name: kind.shared for name, kind in OPTIMIZERS.items()}) != table.OPTIMIZERS:
        raise TypeError(f"the optimizers' classes say {found}, but gem_api.rules {table.OPTIMIZERS}: correct one of them")


_require_rows()
