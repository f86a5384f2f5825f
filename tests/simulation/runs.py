"""The run that a world simulates: its rule and its optimizer, drawn at random."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from gem_api.hyperparameters import Hyperparameters
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.rules import OPTIMIZERS, RULES
from gem_api.schedule import Schedule
from gem_server.rules import rule_of
from simulation.client import SHARD

EPOCHS = 2
_PLAIN_RULES = [("gem", ""), ("gem", ""), ("downpour", ""), ("adaptive", "")]
# Those that keep something for all workers, that take deltas, that leave commits out; and any rule that is new.
_OTHER_RULES = [
    ("gem", "proxy=global"), ("gem", "proxy=yellowfin"), ("dcasgd", "mean_square=0.9"), ("fedbuff", "buffer_size=3"),
    ("diloco", "delay=2"), ("aeasgd", ""), ("ringmaster", "threshold=2"), ("ringmaster", "threshold=1"),
]  # fmt: skip
_NAMED = {rule for rule, _ in (*_PLAIN_RULES, *_OTHER_RULES)} | {"agn", "fedasync"}  # which move θ as others do
_OTHER_RULES += [(rule, "") for rule in RULES if rule not in _NAMED]


def some_settings(random: Random, by_element: bool) -> Hyperparameters:
    """Settings of a run with SGD. With several servers, the rule must treat each parameter by itself (`by_element`)."""
    while True:
        rule, options = random.choice(_OTHER_RULES if random.random() < 0.25 else _PLAIN_RULES)
        settings = Hyperparameters(rule=rule, rule_options=options, batch_size=4, shard_size=SHARD, epochs=EPOCHS)
        if rule_of(settings).by_element or not by_element:
            return settings


def some_optimizer(settings: Hyperparameters, random: Random) -> tuple[Hyperparameters, OptimizerChoice | None]:
    """Some runs have another optimizer: the server was started with it, or the first worker brings it. Returns the settings of
    the server, and what workers bring."""
    if (settings.rule, settings.rule_options) not in _PLAIN_RULES or random.random() >= 0.4:
        return settings, None
    optimizer = random.choice(tuple(OPTIMIZERS))
    if random.random() < 0.5:
        schedule = Schedule("step", 3, 0.1, 5, 0.5) if random.random() < 0.5 else None
        return settings, OptimizerChoice(optimizer, schedule=schedule)
    return replace(settings, optimizer=optimizer), None


def some_shares(settings: Hyperparameters, choice: OptimizerChoice | None, random: Random) -> Hyperparameters:
    """In many runs batches are as large as workers are fast, if the rule can count their shares."""
    shared = replace(settings, smallest_share=0.25)
    try:
        rule_of(replace(shared, optimizer=choice.optimizer if choice else settings.optimizer))
    except ValueError:
        return settings
    return shared if random.random() < 0.6 else settings


def some_average(settings: Hyperparameters, random: Random) -> Hyperparameters:
    """Some runs keep an average of θ."""
    return replace(settings, average=0.9) if random.random() < 0.3 else settings


def some_wait(settings: Hyperparameters, random: Random) -> Hyperparameters:
    """In some runs replies wait for others' commits, if their rule allows it. Steps are short here, so they wait for long."""
    waiting = replace(settings, reply_wait=0.5)
    if random.random() >= 0.3:
        return settings
    try:
        rule_of(waiting)
    except ValueError:
        return settings
    return waiting
