"""Which runs are made, by the question that they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from benchmarks.finals.runs import KINDS, Run

SEEDS = (0, 1, 2)
SLOW = ("mixed", "straggler", "quarter", "first")  # always slow workers: what an expert does about them
RATE = 0.006

TODAY = ""
SHARES = "smallest=0.0625"
WAIT = "wait=0.15 until=200 count=gap"
BOTH = f"{SHARES} {WAIT}"


def _ours(
    settings: Iterable[str],
    profiles: Iterable[str],
    rounds: int = 200,
    seeds: Iterable[int] = SEEDS,
    workers: int = 8,
    rates: Iterable[float] = (RATE,),
    model: str = "transformer",
) -> list[Run]:
    return [
        Run(model, profile, workers, seed, rounds, "ours", f"rate={rate} {setting}".strip())
        for seed, profile, rate, setting in product(seeds, profiles, rates, settings)
    ]


def _rounds(
    team: str,
    profiles: Iterable[str],
    rates: Iterable[float],
    rounds: int = 200,
    seeds: Iterable[int] = SEEDS,
    workers: int = 8,
    model: str = "transformer",
) -> list[Run]:
    return [
        Run(model, profile, workers, seed, rounds, "rounds", f"rate={rate} {team}".strip())
        for seed, profile, rate in product(seeds, profiles, rates)
    ]


ALL = tuple(KINDS)
QUESTIONS: Mapping[str, list[Run]] = {
    "choices": _ours(
        [
            TODAY,
            SHARES,
            BOTH,
            WAIT,
            f"{BOTH} whole=True",
            f"{BOTH} common=True",
            f"{BOTH} whole=True common=True",
            BOTH.replace("200", "0"),
            BOTH.replace("200", "100"),
        ],
        ["mixed", "equal", "exponential", "straggler"],
    ),
    "rivals": [
        *_rounds("", ["equal", "exponential", "mixed"], [0.01, 0.015, 0.02]),
        *_rounds("team=fast", ["mixed", "straggler"], [0.01, 0.015, 0.02]),
        *_rounds("team=proportion", ["mixed", "straggler"], [0.01, 0.015, 0.02, 0.03]),
        *_rounds("team=backup first=6", ["exponential", "noisy"], [0.01, 0.015, 0.02]),
    ],
}


def runs(questions: Iterable[str]) -> list[Run]:
    """The runs for these questions, each once."""
    return list(dict.fromkeys(run for question in questions for run in QUESTIONS[question]))
