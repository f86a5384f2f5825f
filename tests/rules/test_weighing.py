"""Which rules count a commit by its share of a batch: the others refuse batches of different sizes when the server starts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.rules import OPTIMIZERS, RULES
from gem_server.rules import rule_of

WEIGHING = ("gem", "downpour", "adaptive", "ringmaster")


@pytest.mark.parametrize(
    "settings", [{"optimizer": name} for name in ("adam", "adamw", "lion")] + [{"rule": name} for name in WEIGHING]
)
def test_these_rules_take_batches_of_different_sizes(settings: dict[str, Any]) -> None:
    rule_of(Hyperparameters(smallest_share=0.25, **settings))


@pytest.mark.parametrize(
    "settings",
    [{"rule_options": f"proxy={name}"} for name in ("nesterov", "adam", "global", "yellowfin")]
    + [{"rule": name} for name in RULES if name not in WEIGHING]
    + [{"optimizer": "worker"}, {"rule": "downpour", "optimizer": "adamw"}],
)
def test_the_others_refuse_them_in_one_line_and_take_whole_batches(settings: dict[str, Any]) -> None:
    rule_of(Hyperparameters(**settings))
    with pytest.raises(ValueError, match=r"^smallest_share 0.25 .* rule \w+ with these options .*: set it to 1, or use gem"):
        rule_of(Hyperparameters(smallest_share=0.25, **settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"local_steps": 4}, "with local_steps 4: set one of them to 1"), ({"batch_variation": 0.5}, "0.5: set one of them to 0")],
)
def test_local_steps_and_random_sizes_are_refused_too(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rule_of(Hyperparameters(rule="downpour", smallest_share=0.25, **settings))


OTHERS: list[dict[str, Any]] = [
    {}, {"snapshot": "paper"}, {"batch_variation": 0.9}, {"local_steps": 4}, {"rule_options": "proxy=adam"},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_accepts_it_accepts_with_its_defaults(rule: str) -> None:
    for optimizer, others in product(OPTIMIZERS, OTHERS):
        settings = Hyperparameters(rule=rule, optimizer=optimizer, **others)
        if accepted(settings):
            rule_of(settings.with_defaults(["rule", "optimizer", *others]))


def accepted(settings: Hyperparameters) -> bool:
    try:
        rule_of(settings)
    except ValueError:
        return False
    return True
