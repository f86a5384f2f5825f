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
WAIT = "wait=0.15 until=200"
BOTH = f"{SHARES} {WAIT}"
HARD = ("mixed", "equal", "exponential", "straggler")


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
SIX = (0, 1, 2, 3, 4, 5)
DDP_RATES = (0.01, 0.015, 0.02)


def _rivals(
    profiles: Iterable[str], rounds: int, seeds: Iterable[int] = SEEDS, model: str = "transformer", workers: int = 8
) -> list[Run]:
    """What an expert would build for each kind of cluster, at several rates."""
    found = []
    for profile in profiles:
        teams = [""]
        if profile in (*SLOW, "far"):
            teams += ["team=proportion", "team=fast"]
        if profile in ("exponential", "noisy", "pausing"):
            teams.append(f"team=backup first={workers * 3 // 4}")
        for team in teams:
            found += _rounds(team, [profile], DDP_RATES, rounds, seeds, workers, model)
    return found


QUESTIONS: Mapping[str, list[Run]] = {
    "equal": [
        *_ours([BOTH.replace("200", "0"), BOTH, TODAY], ["equal"], seeds=SIX),
        *_rounds("", ["equal"], [0.01, 0.015], seeds=SIX),
    ],
    "in step": _ours([BOTH, TODAY], HARD),
    "rivals": _rivals(HARD, 200),
    "parts": _ours(
        [SHARES, WAIT, f"{BOTH} common=True", BOTH.replace("200", "100"), BOTH.replace("200", "0"), f"{BOTH} whole=False"], HARD
    ),
    "others": [
        *_ours([BOTH, TODAY], [name for name in ALL if name not in HARD]),
        *_rivals([n for n in ALL if n not in HARD], 200),
    ],
    "held out": [
        run
        for model in ("tagger", "trees")
        for run in (
            *_ours([BOTH, TODAY, SHARES], ["equal", "mixed", "exponential"], model=model, rates=(0.003, 0.006)),
            *_rivals(["equal", "mixed", "exponential"], 200, model=model),
        )
    ],
    "long": [*_ours([BOTH, TODAY, SHARES], HARD, 1000), *_rivals(HARD, 1000)],
    "many": [
        run
        for workers in (2, 4, 16, 32)
        for run in (
            *_ours([BOTH, TODAY], ["equal", "mixed", "exponential"], workers=workers),
            *_rivals(["equal", "mixed", "exponential"], 200, workers=workers),
        )
    ],
}


NAMES = {
    "": "today", SHARES: "shares alone", WAIT: "waits alone", f"{BOTH} common=True": "one s for all who wait",
    BOTH.replace("200", "100"): "waits in the first 100 rounds", BOTH.replace("200", "0"): "waits to the end",
    f"{BOTH} whole=False": "π compares with the share's step", BOTH: "in step: waits in the first 200 rounds",
}  # fmt: skip


def ours(settings: str) -> str:
    """The settings of a run of this server."""
    return f"rate={RATE} {settings}".strip()


def named(settings: str) -> str:
    """What is different with these settings; empty if that is in no table."""
    return NAMES.get(settings.removeprefix(f"rate={RATE}").strip(), "")


def runs(questions: Iterable[str]) -> list[Run]:
    """The runs for these questions, each once."""
    return list(dict.fromkeys(run for question in questions for run in QUESTIONS[question]))
