"""One experiment: a training run with all its settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gem_api.hyperparameters import Hyperparameters

TRAINING_SAMPLES = {"mnist": 60_000, "digits": 1_438}  # in a data epoch
# service: gem-train. sequential: momentum SGD in one process, no server. staged: workers of unequal speed, or that come and go.
# simulated: all workers in one process, with the server's update rule.
Setting = Literal["service", "sequential", "staged", "simulated"]


@dataclass(frozen=True)
class Experiment:
    """The settings of one run.

    Attributes:
        task: "mnist" or "digits".
        rule: The update rule.
        workers: How many.
        steps: Gradients that each worker contributes; in a staged run the mean over the workers.
        seed: Of the shuffling, the first θ, dropout.
        learning_rate, momentum, kappa, pi_max, snapshot, batch_size: As in gem-train.
        local_steps: λ: gradients that go into one commit.
        rule_options: `name=value`, separated by blanks, for rules that have settings of their own.
        step_seconds: Simulated compute time of one gradient; 0: none.
        setting: What runs it.
        slowdown: In a staged run, the factor by which the first worker's `step_seconds` is longer.
        replacements: How many times, in a staged run, a group of workers leaves and another joins.
        turns: As in gem-train. All of the paper's workers are equal, so they march in lockstep.
        spread: In a simulated run, the standard deviation of the time for a gradient, as a share of its mean.
        batch_variation, optimizer, reply_wait: In a simulated run, as gem-train's.
    """

    task: str
    rule: str = "gem"
    workers: int = 1
    steps: int = 937
    seed: int = 0
    learning_rate: float = 0.05
    momentum: float = 0.9
    kappa: float = 1.0
    pi_max: float = 5.0
    snapshot: str = "after"
    batch_size: int = 64
    local_steps: int = 1
    rule_options: str = ""
    step_seconds: float = 0.0
    setting: Setting = "service"
    slowdown: float = 1.0
    replacements: int = 0
    turns: str = "fixed"
    spread: float = 0.0
    batch_variation: float = 0.0
    optimizer: str = "sgd"
    reply_wait: float = 0.0

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)

    @property
    def gradients(self) -> int:
        """Gradients that all workers compute together."""
        return self.workers * self.steps

    @property
    def commits_each(self) -> int:
        """Commits of one worker."""
        return max(1, self.steps // self.local_steps)

    def hyperparameters(self) -> Hyperparameters:
        """The settings of a simulated run."""
        names = ["rule", "learning_rate", "batch_size", "seed", "local_steps", "rule_options", "batch_variation", "optimizer"]
        names += ["reply_wait"]
        names += ["momentum", "kappa", "pi_max", "snapshot"] * (self.optimizer == "sgd")
        given = {name: getattr(self, name) for name in names}
        return Hyperparameters(**given).with_defaults(given)
