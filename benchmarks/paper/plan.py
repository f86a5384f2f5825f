"""Which experiments make which figure. Figures share experiments: those with equal settings run once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.page import count
from benchmarks.paper.experiments import Experiment

EFFECTIVE_BATCH = 256  # B of Fig. 4: samples of all workers together in a round
STRAGGLER_SLOWDOWN = 10.0
COMMITS_A_REPLACEMENT = 1400  # in which a group of workers has started, trained, and may go: some ten seconds
PAPERS_STEPS, PAPERS_WORKERS = 937, 100  # of Fig. 2; 937 batches of 64 are one epoch of MNIST
BASIC_RULES = ("gem", "adaptive", "downpour")


@dataclass(frozen=True)
class Scale:
    """The scale of the experiments.

    Attributes:
        steps: Gradients of each worker, if a figure says nothing else; the paper's are 937.
        workers: Of Figs. 1 and 3.
        many, many_steps: Workers of Fig. 2, and their steps; the steps are Fig. 5's too.
        crowd: Workers where one number has to do.
        few: Workers of Figs. 8 and 9, besides `crowd`.
        split: Numbers of workers that Fig. 4's batch is split over.
        rounds, batch_seconds: Steps of each of its workers, and simulated seconds that B samples take one worker.
        kappas: Of Fig. 8.
        unequal: Rules that meet a straggler.
        beyond, beyond_steps: Numbers of workers from one to many more than the paper has, and their steps; one seed.
    """

    task: str = "mnist"
    steps: int = 400
    seeds: int = 3
    workers: tuple[int, ...] = (5, 10, 20, 30)
    many: int = PAPERS_WORKERS
    many_steps: int = PAPERS_STEPS
    crowd: int = 30
    few: int = 10
    split: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 234
    batch_seconds: float = 1.6
    kappas: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    unequal: tuple[str, ...] = BASIC_RULES
    beyond: tuple[int, ...] = (1, 10, 30, 100, 300, 1000)
    beyond_steps: int = 60

    @property
    def base(self) -> Experiment:
        return Experiment(self.task, steps=self.steps)


def quick(task: str) -> Scale:
    """A small version: two numbers of workers, 150 steps, one seed."""
    return Scale(
        task, steps=150, seeds=1, workers=(4, 12), many=12, many_steps=150, crowd=12, few=4, split=(1, 4), rounds=150,
        batch_seconds=0.4, kappas=(1.0, 4.0), unequal=("gem",), beyond=(1, 10, 30),
    )  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Runs of the same settings under different seeds: one line of a figure."""

    label: str
    experiments: tuple[Experiment, ...]

    @property
    def first(self) -> Experiment:
        return self.experiments[0]


# Spread of compute times of workers that march in lockstep, as on equal machines, and of workers whose times are exponential.
LOCKSTEP, AT_RANDOM = 0.05, 1.0
ORDERS: dict[str, dict[str, float]] = {
    "GEM, times that vary": {"spread": AT_RANDOM},
    "GEM in lockstep": {"spread": LOCKSTEP},
    "GEM in lockstep, batches that vary": {"spread": LOCKSTEP, "batch_variation": 0.9},
}


def rates(rule: str, workers: int) -> list[float]:
    """The rates that a rule other than GEM is tried at with so many workers, a factor of about three apart.

    The best with 30 and 100 workers are in docs/results/many-workers. Those of `adaptive`, which divides by the staleness, do
    not depend on the number of workers. Under other rules all gradients that are under way move θ together: rates fall with it.
    """
    if rule == "adaptive":
        return [0.05, 0.15, 0.5]
    less = min(1.0, 30 / workers)
    return [float(f"{rate * less:.2g}") for rate in (0.015, 0.05, 0.15, 0.5)]


def _group(scale: Scale, label: str, seeds: int = 0, **changes: Any) -> Group:
    settings = {**vars(scale.base), **changes}
    return Group(label, tuple(Experiment(**{**settings, "seed": seed}) for seed in range(seeds or scale.seeds)))


def _workers(scale: Scale, **changes: Any) -> list[Group]:
    return [
        _group(scale, f"{rule}, {n} workers", rule=rule, workers=n, **changes) for n in scale.workers for rule in BASIC_RULES
    ]


def _speed(scale: Scale) -> list[Group]:
    return [
        _group(
            scale, count(n), workers=n, steps=scale.rounds, batch_size=EFFECTIVE_BATCH // n,
            step_seconds=scale.batch_seconds / n,
        )
        for n in scale.split
    ]  # fmt: skip


def _against_sequential(scale: Scale) -> list[Group]:
    # With simulated compute time the cores can evaluate often. Otherwise the validation loss would have few points.
    n, steps = scale.crowd, scale.many_steps
    return [
        _group(scale, f"GEM, {n} workers", workers=n, steps=steps, step_seconds=n / 40),
        _sequential(scale, n * steps),
    ]


def _sequential(scale: Scale, steps: int, **changes: Any) -> Group:
    return _group(scale, "sequential momentum SGD", rule="momentum", steps=steps, setting="sequential", **changes)


def _kappas(scale: Scale) -> list[Group]:
    return [
        _group(scale, f"κ = {kappa:g}, {count(n)}", workers=n, kappa=kappa, setting="simulated", spread=LOCKSTEP)
        for n in (scale.few, scale.crowd)
        for kappa in scale.kappas
    ]


def _misspecified(scale: Scale) -> list[Group]:
    counts, rate = sorted({scale.workers[1], scale.crowd}), 0.1
    return [
        _sequential(scale, scale.steps, learning_rate=rate),
        *(
            _group(scale, f"{rule}, {n} workers", rule=rule, workers=n, learning_rate=rate)
            for n in counts
            for rule in BASIC_RULES
        ),
    ]


def _straggler(scale: Scale) -> list[Group]:
    # Slow enough for the cores to keep up, so that the workers differ only in the simulated time.
    n = scale.few
    common: dict[str, Any] = {"workers": n, "step_seconds": n / 100, "setting": "staged"}
    return [
        _group(scale, f"{rule}, {name}", rule=rule, slowdown=slowdown, **common)
        for rule in scale.unequal
        for name, slowdown in (("all alike", 1.0), ("with a straggler", STRAGGLER_SLOWDOWN))
    ]


def _churn(scale: Scale) -> list[Group]:
    often = max(2, scale.crowd * scale.steps // COMMITS_A_REPLACEMENT)
    return [
        _group(scale, f"gem, {name}", workers=scale.crowd, setting="staged", replacements=replacements)
        for name, replacements in (("workers stay", 0), ("workers come and go", often))
    ]


def _proxies(scale: Scale) -> list[Group]:
    kinds = (
        ("a moment for each worker", "", 5.0),
        ("global: 8 moments for all", "proxy=global", 5.0),
        ("tuned by YellowFin", "proxy=yellowfin", 5.0),
        ("Nesterov", "proxy=nesterov", 5.0),
        ("Adam, π up to 100", "proxy=adam proxy_rate=0.001", 100.0),
    )
    return [_group(scale, name, workers=scale.crowd, rule_options=options, pi_max=most) for name, options, most in kinds]


def _beyond(scale: Scale) -> list[Group]:
    # A label has a group for each number of workers, and for each rate that was tried with it.
    def of(label: str, n: int, **changes: Any) -> Group:
        return _group(scale, label, 1, workers=n, steps=scale.beyond_steps, setting="simulated", **changes)

    groups = []
    for n in scale.beyond:
        groups += [of(label, n, **changes) for label, changes in ORDERS.items()]
        for rule in BASIC_RULES[1:]:
            for rate in rates(rule, n):
                groups.append(of(f"{rule}, times that vary", n, rule=rule, learning_rate=rate, spread=AT_RANDOM))
    return groups


FIGURES: dict[str, Callable[[Scale], list[Group]]] = {
    "1": _workers,
    "2": lambda scale: [_group(scale, f"gem, {scale.many} workers", workers=scale.many, steps=scale.many_steps)],
    "3": lambda scale: [_group(scale, f"{n} workers", workers=n) for n in scale.workers],
    "4": _speed,
    "5": _against_sequential,
    "6": _misspecified,
    "8": _kappas,
    "9-10": lambda scale: [_group(scale, f"{n} workers", workers=n) for n in sorted({scale.few, scale.crowd})],
    "conventions": lambda scale: [
        _group(scale, f"snapshot {name}", workers=scale.crowd, snapshot=name) for name in ("after", "paper", "reference")
    ],
    "straggler": _straggler,
    "churn": _churn,
    "proxies": _proxies,
    "beyond": _beyond,
}


def experiments(figures: list[str], scale: Scale) -> list[Experiment]:
    """The experiments of the figures, each once, in the figures' order; the first seed of all before the second."""
    wanted = dict.fromkeys(each for name in figures for group in FIGURES[name](scale) for each in group.experiments)
    return sorted(wanted, key=lambda experiment: experiment.seed)
