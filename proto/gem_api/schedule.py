"""The schedule of the learning rate: a pure function of the version, used by the server and by workers' local steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from gem_api.hyperparameters import DEFAULTS, Hyperparameters


@dataclass(frozen=True)
class Schedule:
    """The hyper-parameters that are a schedule together. A run takes all of them from its server, or all from a worker."""

    schedule: str = DEFAULTS["schedule"]
    warmup_versions: int = DEFAULTS["warmup_versions"]
    warmup_factor: float = DEFAULTS["warmup_factor"]
    decay_versions: int = DEFAULTS["decay_versions"]
    decay_factor: float = DEFAULTS["decay_factor"]

    @classmethod
    def of(cls, settings: object) -> Schedule:
        """The schedule of a run's hyper-parameters, or of a message that has these fields."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})

    def __str__(self) -> str:
        """For people, such as "warm-up over 10, then cosine to ×0.1 over 200 commits of whole batches"; "constant" if it is
        that."""
        parts = {
            "constant": [],
            "step": [f"×{self.decay_factor:g} every {self.decay_versions}"],
        }.get(self.schedule, [f"cosine to ×{self.decay_factor:g} over {self.decay_versions}"])
        if self.warmup_versions:
            shape = "cosine warm-up" if self.schedule == "onecycle" else "warm-up"
            start = f" from ×{self.warmup_factor:g}" if self.warmup_factor else ""
            parts = [f"{shape}{start} over {self.warmup_versions}", *parts]
        return ", then ".join(parts) + " commits of whole batches" if parts else "constant"


_NEAR = 0.1  # of the commits that are left: a schedule that ends this close to its end fits it
_SMALLEST = 1e-30  # a rate, or a factor of one, that another is divided by: steps with a smaller one are nearly 0 in float32


def factor(hyperparameters: Hyperparameters, version: float) -> float:
    """The factor of η at version t, in [0, 1]: η_t = η · warm-up · decay.

    With w = warmup_versions, f = warmup_factor, T = decay_versions, γ = decay_factor, u = max(0, t − w) and
    fall(x) = ½·(1 + cos(π·min(1, x))):
        warm-up     f + (1 − f)·x if t < w, else 1. x = t/w, but (t + 1)/w if f = 0: the first rate is not 0
        constant    1
        step        γ^⌊u/T⌋
        cosine      γ + (1 − γ)·fall(u/T)       (Loshchilov & Hutter 2016, arXiv 1608.03983, Eq. 5, one period)
        onecycle    as cosine; its warm-up has 1 − fall(x) in place of x
    """
    start, last, span = hyperparameters.warmup_factor, hyperparameters.decay_factor, hyperparameters.decay_versions
    if version < hyperparameters.warmup_versions:
        risen = min(1.0, (version if start else version + 1) / hyperparameters.warmup_versions)
        return start + (1 - start) * (1 - _fall(risen) if hyperparameters.schedule == "onecycle" else risen)
    passed = version - hyperparameters.warmup_versions
    if hyperparameters.schedule == "step":
        return float(last ** (passed // span))
    if hyperparameters.schedule in ("cosine", "onecycle"):
        return last + (1 - last) * _fall(passed / span)
    return 1.0


def _fall(passed: float) -> float:
    """Half a period of a cosine, from 1 at 0 to 0 at 1, and 0 from there on."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, passed)))


def eta_change(now: float, before: float) -> float:
    """`now` divided by `before`, two learning rates or their factors: how a moment that holds steps changes with them. It is 1
    if `before` is nearly 0."""
    return now / before if before > _SMALLEST else 1.0


class Eta(NamedTuple):
    """η_t as its two parts: the learning rate η, and the schedule's factor for it."""

    rate: float
    factor: float

    @classmethod
    def at(cls, hyperparameters: Hyperparameters, version: float) -> Eta:
        """η_t at a version."""
        return cls(hyperparameters.learning_rate, factor(hyperparameters, version))

    def change_since(self, before: Eta | None) -> float:
        """As `eta_change`; 1 if there is none before."""
        return 1.0 if before is None else eta_change(self.factor, before.factor) * eta_change(self.rate, before.rate)


def rate(hyperparameters: Hyperparameters, version: float) -> float:
    """η_t, the learning rate at a version."""
    return hyperparameters.learning_rate * factor(hyperparameters, version)


def server_rate(hyperparameters: Hyperparameters, version: float) -> float | None:
    """η_t at a version; None if the workers' own optimizers have the run's rates, so that the server applies none."""
    return None if hyperparameters.optimizer == "worker" else rate(hyperparameters, version)


def misfit(hyperparameters: Hyperparameters, commits: float, done: float = 0.0) -> str:
    """How a schedule misses the end of a run of that many commits, of which `done` were made before this start of the server,
    and what to set. Empty if the two are within 10 % of what is left, if the schedule has no end, or if the server applies
    none."""
    length = hyperparameters.warmup_versions + hyperparameters.decay_versions
    ends = hyperparameters.schedule in ("cosine", "onecycle") and hyperparameters.optimizer != "worker"
    if not ends or abs(length - commits) <= _NEAR * (commits - done):
        return ""
    at_end = f"{rate(hyperparameters, commits):.3g}"
    if length < commits:
        part, of = 100 * max(0.0, length - done) / (commits - done), "what is left of the run" if done else "the run"
        how = f"ends after about {part:.0f} % of {of}; the learning rate is {at_end} from then on"
    else:
        how = f"is only {100 * commits / length:.0f} % done at the run's end; the learning rate is still {at_end} then"
    return (
        f"the schedule {how}: restart the server with --resume and this --schedule, or other --epochs; in another run give the "
        f"loop's scheduler {commits:.0f} steps"
    )


def require_schedule(hyperparameters: Hyperparameters) -> None:
    """Raises ValueError for a schedule without its length."""
    if hyperparameters.schedule != "constant" and not hyperparameters.decay_versions:
        name = hyperparameters.schedule
        raise ValueError(f"--schedule {name} needs the number of commits that it takes: write --schedule {name}:versions=N")
