"""One run, and the methods that runs compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["characters", "mnist"]
WARMUP_STEPS = 10  # of each worker; then the learning rate is constant


@dataclass(frozen=True)
class Method:
    """An update rule with an optimizer.

    Attributes:
        label: As in tables and plots.
        rule, optimizer, local_steps: As in gem-train.
        rates: The learning rates to try first, as places on the ladder of `rate`.
        kappa: The default κ; None if the rule has none.
    """

    label: str
    rule: str
    optimizer: str
    rates: tuple[int, ...]
    local_steps: int = 1
    kappa: float | None = None

    @property
    def own(self) -> bool:
        """Whether each worker has an optimizer of its own."""
        return self.optimizer == "worker"


# A ladder of rates: 2k stands for 10^k, 2k + 1 for 3·10^k.
METHODS = {
    "gem-adamw": Method("GEM around a shared AdamW", "gem", "adamw", (-7, -6, -5, -4), kappa=2.0),
    "downpour-adamw": Method("shared AdamW as it comes", "downpour", "adamw", (-8, -7, -6, -5)),
    "gem-own": Method("GEM around workers' own AdamW", "gem", "worker", (-7, -6, -5, -4), kappa=2.0),
    "downpour-own": Method("workers' own AdamW, as it comes", "downpour", "worker", (-8, -7, -6, -5)),
    "adaptive-own": Method("workers' own AdamW, divided by τ + 1", "adaptive", "worker", (-6, -5, -4, -3)),
    "diloco-8": Method("DiLoCo, 8 steps of own AdamW", "diloco", "worker", (-7, -6, -5, -4), local_steps=8),
    "diloco-32": Method("DiLoCo, 32 steps of own AdamW", "diloco", "worker", (-7, -6, -5, -4), local_steps=32),
    "gem-sgd": Method("the paper's GEM (SGD)", "gem", "sgd", (-3, -2, -1, 0), kappa=1.0),
}


def rate(place: int) -> float:
    """The learning rate at a place on the ladder …, 1e-3, 3e-3, 1e-2, 3e-2, …"""
    exponent, half = divmod(place, 2)
    return float(f"{3 if half else 1}e{exponent}")


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        method: A key of METHODS.
        workers: How many.
        steps: Gradients that each worker computes.
        place: The learning rate's place on the ladder.
        kappa: None if the rule has none.
        seed: Of the first θ and of the order of the samples.
        batch_size: Samples in a gradient: windows of 32 characters, or images.
        warmup: Steps of each worker over which the learning rate rises linearly.
    """

    method: str
    workers: int
    steps: int
    place: int
    kappa: float | None = None
    seed: int = 0
    task: Task = "characters"
    batch_size: int = 8
    warmup: int = WARMUP_STEPS

    @property
    def rate(self) -> float:
        return rate(self.place)

    @property
    def name(self) -> str:
        kappa = "" if self.kappa is None else f", κ {self.kappa:g}"
        return f"{self.task}, {self.method}, {self.workers} x {self.steps}, rate {self.rate:g}{kappa}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What came out of a run.

    Attributes:
        outcome: "complete" or "diverged".
        test_loss: Loss of the last θ on held-out data; None if it is NaN or infinite.
        accuracy: On held-out data, 0 to 1; None if the task has none.
        seconds: How long the run took, its start and end included.
        staleness: Mean over the commits.
        pi: Mean over the commits of their median π; None if the rule has none.
    """

    outcome: str
    test_loss: float | None
    accuracy: float | None
    seconds: float
    staleness: float | None
    pi: float | None

    @property
    def loss(self) -> float:
        """The held-out loss; infinity if the run diverged."""
        return float("inf") if self.outcome == "diverged" or self.test_loss is None else self.test_loss
