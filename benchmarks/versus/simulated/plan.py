"""Which runs are made, by the question that they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from benchmarks.versus.simulated.runs import Run

SEEDS = (0, 1, 2)
RATE = 0.003  # the best rate of one worker with AdamW on the transformer
ROUNDS_RATE = 0.01  # the best one of rounds, with 8, 16 and 32 workers
COUNTS = (4, 8, 16, 32)
MANY = (100,)
KINDS = ("noisy", "straggler", "mixed", "exponential", "spot")
FEW = ("quarter", "first", "pausing")
ABLATED = ("equal", "mixed", "exponential")

# What is left out, or replaced, and the settings that do it.
PARTS: Mapping[str, str] = {
    "without look-ahead": "reach=0",
    "without π": "bound=none",
    "memory in commits": "memory=commits",
    "v of single gradients, rate/√n": "split=False",
    "κ does not grow (2)": "grows=not kappa=2.0",
}
CHOICES: Mapping[str, str] = {
    "n: mean of the worker's last stalenesses, and 1": "count=mean",
    "predicts by that mean, n stays": "horizon=mean",
    "predicts with Δ": "predict=raw",
    "predicts with the mean movement": "predict=mean",
    "π = 1/gap": "bound=gap",
    "κ·n/2, κ = 1": "grows=half kappa=1.0",
    "κ = 1": "kappa=1.0",
    "κ = 2.5": "kappa=2.5",
    "ρ = 1": "reach=1.0",
    "ρ = 2": "reach=2.0",
    "memory of n": "memory=n",
    "ρ at once": "gradual=False",
    "θ short of s counts half in π": "against=0.5",
    "θ short of s does not count in π": "against=0.0",
}
OWN: Mapping[str, str] = {"before": "", "now": "kappa=1.5 root=True shrink=True ahead=0.5"}
ALONE = (0.001, 0.002, RATE, 0.006, 0.01)
CASES: Mapping[str, str] = {
    "overlap": "overlap=True",
    "int8 gradients": "altered=int8",
    "clipped to norm 1": "altered=clipped",
    "a worker joins every 2 units": "joining=late",
    "2 gradients a commit": "accumulated=twice",
    "1 to 4 gradients a commit": "accumulated=varied",
}


def runs(questions: Iterable[str]) -> list[Run]:
    """The runs for these questions, each once."""
    return list(dict.fromkeys(run for question in questions for run in QUESTIONS[question]))


def _of(
    method: str, settings: Iterable[str], counts: Iterable[int], profiles: Iterable[str], limit: float = 300.0
) -> list[Run]:
    return [
        Run("transformer", profile, count, seed, method, setting, limit)
        for seed, count, profile, setting in product(SEEDS, counts, profiles, settings)
    ]


def _rates(*rates: float) -> list[str]:
    return [f"rate={rate}" for rate in rates]


def _with(settings: Mapping[str, str]) -> list[str]:
    return [f"rate={RATE} {setting}".strip() for setting in settings.values()]


def _convnet() -> list[Run]:
    methods = {
        "rounds": ["rate=0.01 optimizer=sgd", "rate=0.02 optimizer=sgd", "rate=0.04 optimizer=sgd", *_rates(0.003, 0.006)],
        "paper": ["rate=0.05", "rate=0.05 ahead=1.0"],
        "before": _rates(0.001),
        "ahead": _rates(0.001, 0.002, 0.003),
    }
    return [
        Run("convnet", profile, count, seed, method, setting, 240.0)
        for seed, count, profile in product(SEEDS, (4, 16), ABLATED)
        for method, settings in methods.items()
        for setting in settings
        if profile == "equal" or method != "rounds"
    ]


QUESTIONS: Mapping[str, list[Run]] = {
    "equal": [
        *_of("ahead", _rates(RATE), COUNTS, ["equal"]),
        *_of("rounds", _rates(0.006, ROUNDS_RATE, 0.015), COUNTS, ["equal"]),
    ],
    "kinds": [
        *_of("ahead", _rates(RATE), [16], KINDS),
        *_of("leased", _rates(RATE), [16], ("equal", *KINDS)),
        *_of("before", _rates(RATE), [16], ["equal", *KINDS]),
        *_of("rounds", _rates(ROUNDS_RATE), [16], KINDS[:-1], 600.0),
    ],
    "few": [run for method in ("before", "leased", "ahead") for run in _of(method, _rates(RATE), [16], FEW, 320.0)],
    "rates": _of("ahead", _rates(0.001, 0.0015, 0.006, 0.009), [16], ["equal"]),
    "parts": _of("ahead", _with(PARTS), [16], ABLATED, 160.0),
    "choices": _of("ahead", _with(CHOICES), [16], ABLATED, 160.0),
    "cases": _of("ahead", _with(CASES), [16], ["equal", "exponential"], 160.0),
    "many": [
        *_of("ahead", _rates(RATE), MANY, ["equal", "exponential"]),
        *_of("rounds", _rates(ROUNDS_RATE, 0.015), MANY, ["equal"]),
    ],
    "rivals": _of(
        "dana",
        [*_rates(0.0003, 0.001, 0.003), *(f"rate={rate} gap=True" for rate in (0.0003, 0.001, 0.003))],
        [16],
        ["equal"],
        160.0,
    ),
    "own": _of("own", _with(OWN), [4, 16], ABLATED, 160.0),
    "alone": _of("ahead", _rates(*ALONE), [1], ["equal"], 800.0),
    "convnet": _convnet(),
}
