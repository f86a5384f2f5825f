"""The update rules, by name."""

from __future__ import annotations

from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import require_schedule

from gem_server.rules.aeasgd import Aeasgd
from gem_server.rules.base import ArrayRule, PiFacts, RuleInput, Shared, UpdateRule, require_waiting, require_weighing
from gem_server.rules.dana import Dana
from gem_server.rules.dcasgd import DcAsgd
from gem_server.rules.diloco import DiLoCo
from gem_server.rules.fedasync import FedAsync
from gem_server.rules.fedbuff import FedBuff
from gem_server.rules.gem import Gem
from gem_server.rules.gem_ahead import GemAhead
from gem_server.rules.gradient_rule import GradientRule
from gem_server.rules.make import load, make, where_raised
from gem_server.rules.plain import Adaptive, Agn, Downpour, Rescaled
from gem_server.rules.ringmaster import Ringmaster

RULES: dict[str, type[UpdateRule]] = {
    rule.name: rule
    for rule in (Gem, Downpour, Adaptive, Agn, Aeasgd, DcAsgd, FedAsync, FedBuff, Ringmaster, DiLoCo, Dana, Rescaled)
}  # fmt: skip

__all__ = [
    "RULES",
    "ArrayRule",
    "PiFacts",
    "RuleInput",
    "Shared",
    "UpdateRule",
    "is_users",
    "make_rule",
    "require_named",
    "rule_of",
    "where_raised",
]


_BUILT_IN = frozenset({GemAhead, *RULES.values()})


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
    made = make(kind, rule_options, settings)
    takes_it = isinstance(made, GradientRule) or (optimizer == "worker" and made.kind == "delta")
    if optimizer != "sgd" and not takes_it:
        raise ValueError(f"rule {rule} can't apply --optimizer {optimizer}: use gem, downpour or adaptive")
    return made


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
    count commits by their shares of a batch, or let replies wait, as they ask for."""
    require_schedule(settings)
    rule = make_rule(**vars(settings))
    require_weighing(rule, settings)
    require_waiting(rule, settings)
    return rule
