"""Which runs are made, by the question that they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product

from benchmarks.finals.runs import Run
from benchmarks.versus.profiles import KINDS

SEEDS = (0, 1, 2)
SLOW = ("mixed", "straggler", "quarter", "first")  # always slow workers: what an expert does about them
RATE = 0.008

GROWTH = "growth=10"
SHARES = "smallest=0.0625"
WAIT = "wait=0.15 until=200"
BOTH = f"{SHARES} {WAIT} {GROWTH}"
UNBOUND, NO_LOOK = f"{BOTH} bound=False", f"{BOTH} reach=0.0 reach_held=0.0"  # lower rates may suit them better
UNTUNED = {  # and the rates that are tried there, of this server and of DDP
    "tagger": ((0.008, 0.016, 0.032), (0.008, 0.015, 0.03, 0.06)),
    "trees": ((0.002, 0.004, 0.008, 0.016), (0.004, 0.008, 0.015, 0.03)),
}
OTHER_RATES = (*UNTUNED, "convnet", "large")  # this server takes the best of several rates, as the rivals
HARD = ("mixed", "equal", "exponential", "straggler")


def _runs(
    method: str,
    settings: Iterable[str],
    profiles: Iterable[str],
    rounds: int = 200,
    seeds: Iterable[int] = SEEDS,
    workers: int = 8,
    rates: Iterable[float] = (RATE,),
    model: str = "transformer",
) -> list[Run]:
    return [
        Run(model, profile, workers, seed, rounds, method, f"rate={rate} {setting}".strip())
        for seed, profile, rate, setting in product(seeds, profiles, rates, settings)
    ]


_ours = partial(_runs, "ours")
WITHOUT = {"mixed": (4, 300), "straggler": (7, 222), "quarter": (2, 615), "first": (1, 667)}  # their fast ones, in as long
NUMBERS, LENGTHS = (
    (1, 4, 16),
    (50, 200, 800, 3200),
)  # of workers, and of rounds: what is gained in as long, lost with as much data
OTHERS = tuple(name for name in KINDS if name not in HARD)
BEST_RIVALS = {  # of the first three seeds; further seeds are made of them alone
    "equal": "rate=0.015", "noisy": "rate=0.02 team=backup first=4", "straggler": "rate=0.015 team=fast",
    "mixed": "rate=0.02 team=proportion", "exponential": "rate=0.015 team=backup first=1", "spot": "rate=0.015",
    "far": "rate=0.015 team=fast", "quarter": "rate=0.015 team=fast", "first": "rate=0.01 team=proportion",
    "pausing": "rate=0.015 team=backup first=6",
}  # fmt: skip
FRESH_RIVALS = {**BEST_RIVALS, "first": "rate=0.015 team=proportion"}  # the best of six seeds
BEYOND = (
    ("noisy", 0.02, "team=backup first=4"), ("noisy", 0.03, "team=backup first=4"), ("mixed", 0.03, "team=proportion"),
    ("exponential", 0.02, "team=backup first=1"), ("exponential", 0.02, "team=backup first=2"),
    ("spot", 0.01, ""), ("far", 0.01, "team=fast"),
    ("quarter", 0.01, "team=fast"), ("first", 0.01, "team=proportion"), ("first", 0.006, "team=proportion"),
    ("pausing", 0.01, "team=backup first=6"),
)  # fmt: skip
MORE_SEEDS = (3, 4, 5)
FRESH = (6, 7, 8, 9, 10, 11)  # of runs that had no part in any choice
THREE = ("equal", "mixed", "exponential")
EQUAL_AND_MIXED = ("equal", "mixed")
TWO = (0, 1)
SIX = (0, 1, 2, 3, 4, 5)
DDP_RATES = (0.01, 0.015, 0.02)
FEW_RATES = (0.006, 0.01, 0.015)
ALL, FAST, PROPORTION, BACKUP = "DDP, all", "without the slow", "in proportion", "backup workers"
CONSTANT = "schedule=constant"
SHORTER = "memory=0.5625"  # of rounds: as long as that of this server's rule, (n + 1)/2n of the usual, with 8 equal workers
MEMORIES = (SHORTER, "memory=0.25", "memory=0.125")  # of rounds
OUR_MEMORIES = ("memory=1.0", "memory=0.25", "memory=0.125")  # of this server, whose default is 0.5
MEMORY_FOR = ("equal", "mixed", "straggler")  # the kinds in which all of them are tried
MEMORY_AT = (*((profile, 200) for profile in MEMORY_FOR), ("equal", 1000), ("mixed", 1000))  # and how long
TEAMS = {profile: settings.partition(" ")[2] for profile, settings in BEST_RIVALS.items()}
BEST_SHORTER = {  # the rate of their best, with a shorter memory, of the first three seeds
    "equal": 0.015, "noisy": 0.02, "straggler": 0.02, "mixed": 0.02, "exponential": 0.01, "spot": 0.015, "far": 0.02,
    "quarter": 0.015, "first": 0.015, "pausing": 0.02,
}  # fmt: skip
ONE_WORKERS_RATES = {  # in 200 batches
    "large": (0.001, 0.002, 0.004, 0.008), "convnet": (0.002, 0.004, 0.008, 0.016), "tagger": (0.008, 0.016, 0.032),
    "trees": (0.002, 0.004, 0.008, 0.016, 0.032),
}  # fmt: skip
APART = {  # what else trains without waiting in each step, and how
    "local SGD, 8 steps": ("local", "steps=8"),
    "DiLoCo, 20 steps": ("local", "steps=20 outer=0.7 momentum=0.9"),
    "one worker, as many samples": ("rounds", "team=alone"),
    "AdamW alone": ("plain", ""),
    "DANA": ("dana", ""),
    "Gap-Aware": ("dana", "gap=True"),
}


def team(profile: str, memory: str = "") -> str:
    """The settings of the best form of DDP for a kind of cluster, with a memory of its own if given."""
    return " ".join(each for each in (TEAMS[profile], memory) if each)


def designs(profile: str, workers: int) -> dict[str, str]:
    """What an expert would build for a kind of cluster: the settings, by name."""
    found = {ALL: ""}
    if profile in (*SLOW, "far"):
        found |= {FAST: "team=fast", PROPORTION: "team=proportion"}
    if profile in ("exponential", "noisy", "pausing"):
        firsts = [workers * eighths // 8 for eighths in (6, 4, 2, 1)]
        found |= {f"{BACKUP}, first {first}": f"team=backup first={first}" for first in firsts if first}
    return found


def _rivals(
    profiles: Iterable[str],
    rounds: int,
    seeds: Iterable[int] = SEEDS,
    model: str = "transformer",
    workers: int = 8,
    rates: Iterable[float] = DDP_RATES,
    more: str = "",
) -> list[Run]:
    """What an expert would build for each kind of cluster, at several rates."""
    return [
        run
        for profile in profiles
        for settings in designs(profile, workers).values()
        for run in _runs(
            "rounds", [f"{settings} {more}".strip()], [profile], rounds, seeds, workers,
            FEW_RATES if _few(settings, workers) else rates, model,
        )
    ]  # fmt: skip


def _few(settings: str, workers: int) -> bool:
    """Whether a round's gradients are those of half of the workers or less, which suits lower rates."""
    first = settings.rpartition("first=")[2]
    return first.isdigit() and int(first) <= workers // 2


QUESTIONS: Mapping[str, list[Run]] = {
    "in step": [*_ours([BOTH], HARD, seeds=SIX), *_ours([BOTH], OTHERS)],
    "rivals": [*_rivals(HARD, 200), *_rivals(OTHERS, 200, rates=(0.015, 0.02))],
    "seeds": [
        *_ours([BOTH], OTHERS, seeds=MORE_SEEDS),
        *(
            Run("transformer", profile, 8, seed, 200, "rounds", settings)
            for seed, (profile, settings) in product(MORE_SEEDS, BEST_RIVALS.items())
        ),
    ],
    "edges": [  # the rate beyond that of the best rival, if that was the last one tried
        Run("transformer", profile, 8, seed, 200, "rounds", f"rate={rate} {team}".strip())
        for seed, (profile, rate, team) in product(SEEDS, BEYOND)
    ],
    "held out": [
        run
        for model, (rates, theirs) in UNTUNED.items()
        for run in (
            *_ours([BOTH], THREE, seeds=TWO, model=model, rates=rates),
            *_rivals(THREE, 200, TWO, model, rates=theirs),
        )
    ],
    "many": [
        run
        for workers in (16, 4, 2, 32)
        for run in (
            *_ours([BOTH], THREE, seeds=TWO, workers=workers),
            *_rivals(THREE, 200, TWO, workers=workers, rates=(0.015, 0.02)),
        )
    ],
    "long": [
        *_ours([BOTH], HARD, 1000, TWO), *_rivals(HARD, 1000, TWO, rates=(0.01, 0.015)),
        *_ours([f"{SHARES} {GROWTH}", BOTH.replace("200", "0")], EQUAL_AND_MIXED, 1000, TWO),
    ],
    "lengths": [
        *_ours([BOTH], EQUAL_AND_MIXED, 400, TWO),
        *_rivals(EQUAL_AND_MIXED, 400, TWO, rates=(0.01, 0.015)),
        *_ours([BOTH], EQUAL_AND_MIXED, 3000, (0,)),
        *(Run("transformer", each, 8, 0, 3000, "rounds", f"rate=0.01 {team(each)}".strip()) for each in EQUAL_AND_MIXED),
        *(  # the rates beyond those
            run
            for rounds, seeds, profiles, rate in (
                (400, TWO, EQUAL_AND_MIXED, 0.02), (1000, TWO, MEMORY_FOR, 0.02),
                (3000, (0,), EQUAL_AND_MIXED, 0.015),
            )
            for profile in profiles
            for run in _runs("rounds", [team(profile)], [profile], rounds, seeds, rates=(rate,))
        ),
    ],
    "memory": [
        *(
            run
            for profile in TEAMS
            for rates in [(0.015, 0.02, 0.03) if profile in ("mixed", "noisy") else DDP_RATES]
            for run in _runs("rounds", [team(profile, SHORTER)], [profile], rates=rates)
        ),
        *(  # the rates beyond those
            run
            for profile, memory, rate in (
                ("straggler", SHORTER, 0.03), ("far", SHORTER, 0.03), ("pausing", SHORTER, 0.03),
                ("exponential", SHORTER, 0.006), ("equal", MEMORIES[1], 0.03), ("mixed", MEMORIES[1], 0.03),
            )
            for run in _runs("rounds", [team(profile, memory)], [profile], rates=(rate,))
        ),
        *(
            run
            for memory, profile in product(MEMORIES[1:], MEMORY_FOR)
            for run in _runs("rounds", [team(profile, memory)], [profile], rates=DDP_RATES)
        ),
        *_ours([f"{BOTH} {memory}" for memory in OUR_MEMORIES], HARD),
        *_ours([f"{BOTH} {memory}" for memory in (OUR_MEMORIES[0], OUR_MEMORIES[-1])], EQUAL_AND_MIXED, 1000, TWO),
        *(
            run
            for profile in EQUAL_AND_MIXED
            for run in _runs("rounds", [team(profile, SHORTER)], [profile], 1000, TWO, rates=(0.01, 0.015))
        ),
        *(
            run
            for profile, rate in BEST_SHORTER.items()
            for run in _runs("rounds", [team(profile, SHORTER)], [profile], seeds=MORE_SEEDS, rates=(rate,))
        ),
    ],
    "fresh": [
        *_ours([BOTH], KINDS, seeds=FRESH),
        *(
            Run("transformer", profile, 8, seed, 200, "rounds", settings)
            for seed, profile in product(FRESH, KINDS)
            for settings in (FRESH_RIVALS[profile], f"rate={BEST_SHORTER[profile]} {team(profile, SHORTER)}")
        ),
    ],
    "shorter elsewhere": [
        run
        for model, rates in (("convnet", (0.004, 0.008, 0.016)), *((name, theirs) for name, (_, theirs) in UNTUNED.items()))
        for profile in THREE
        for run in _runs("rounds", [team(profile, SHORTER)], [profile], 200, TWO, rates=rates, model=model)
    ],
    "one worker's rate": [
        run
        for model, rates in ONE_WORKERS_RATES.items()
        for run in _ours([BOTH], ["equal"], seeds=(0,) if model == "large" else TWO, workers=1, rates=rates, model=model)
    ],
    "constant": [
        *_ours([f"{BOTH} {CONSTANT}"], HARD, rates=(0.003, 0.006, 0.009)), *_rivals(HARD, 200, more=CONSTANT),
        *_runs("rounds", [f"{team('straggler')} {CONSTANT}"], ["straggler"], rates=(0.006,)),
        *_runs("rounds", [f"{team('exponential')} {CONSTANT}"], ["exponential"], rates=(0.003,)),
        *(
            run
            for profile in HARD
            for run in _runs(
                "rounds", [f"{team(profile, SHORTER)} {CONSTANT}"], [profile],
                rates=(0.003, 0.006, 0.01) if profile == "exponential" else FEW_RATES,
            )
        ),
        *_ours([f"{BOTH} {CONSTANT}"], HARD, seeds=MORE_SEEDS, rates=(0.006,)),  # the best of three seeds, as these:
        *(
            run
            for profile, memory in product(HARD, ("", SHORTER))
            for run in _runs(
                "rounds", [f"{team(profile, memory)} {CONSTANT}".strip()], [profile], seeds=MORE_SEEDS,
                rates=(0.006 if profile == "exponential" else 0.01,),
            )
        ),
    ],
    "apart": [
        Run("transformer", profile, 8, seed, 200, method, f"rate={rate} {settings}")
        for seed, profile, (method, settings), rate in product(TWO, THREE, APART.values(), (0.003, 0.006, 0.01, 0.02, 0.04))
        if method in ("local", "rounds") and (profile == "equal" and rate < 0.02 if "alone" in settings else rate > 0.003)
    ],
    "neighbours": [
        run
        for method, settings in APART.values()
        if method in ("dana", "plain")
        for run in (
            *_runs(method, [settings], THREE, seeds=TWO, rates=(0.001, 0.002, 0.004)),
            *(_runs(method, [settings], THREE, seeds=TWO, rates=(0.00025, 0.0005)) if method == "plain" else ()),
            *(_runs(method, [settings], ["exponential"], seeds=TWO, rates=(0.008,)) if "gap" in settings else ()),
        )
    ],
    "convnet": [
        *_ours([BOTH], THREE, seeds=TWO, model="convnet", rates=(0.002, 0.004, 0.008)),
        *_rivals(THREE, 200, TWO, model="convnet", rates=(0.004, 0.008, 0.016)),
    ],
    "large": [
        *_ours([BOTH], EQUAL_AND_MIXED, seeds=(0,), model="large", rates=(0.001, 0.002, 0.004, 0.008)),
        *_rivals(EQUAL_AND_MIXED, 200, (0,), "large", rates=(0.001, 0.002, 0.004, 0.008)),
    ],
    "short": [*_ours([BOTH], EQUAL_AND_MIXED, 50), *_rivals(EQUAL_AND_MIXED, 50)],
    "number": [
        run
        for workers, rounds in product(NUMBERS, LENGTHS)
        if workers * rounds <= LENGTHS[-1]
        for run in _ours([BOTH], ["equal"], rounds, workers=workers, rates=(RATE / 2, RATE, RATE * 2))
    ],
    "without the slow": [
        run for workers, rounds in WITHOUT.values() for run in _ours([BOTH], ["equal"], rounds, workers=workers)
    ],
    "parts": [
        *_ours(
            [
                GROWTH, f"{SHARES} {GROWTH}", f"{WAIT} {GROWTH}", f"{SHARES} {WAIT}", UNBOUND, NO_LOOK,
            ],
            HARD,
            seeds=SIX,
        ),
        *_ours([UNBOUND], HARD, rates=(0.003, 0.004, 0.006)),
        *_ours([NO_LOOK], HARD, rates=(0.004, 0.006)),
        *_ours([UNBOUND], ["equal", "mixed", "straggler"], seeds=MORE_SEEDS, rates=(0.004,)),  # the best of three seeds
        *_ours([UNBOUND], ["exponential"], seeds=MORE_SEEDS, rates=(0.006,)),
        *_ours([NO_LOOK], EQUAL_AND_MIXED, seeds=MORE_SEEDS, rates=(0.006,)),
    ],
    "rates": _ours([BOTH], HARD, rates=(0.006, 0.011)),
}  # fmt: skip


NAMES = {
    GROWTH: "the rule alone", f"{SHARES} {GROWTH}": "without waits", f"{WAIT} {GROWTH}": "without shares",
    f"{SHARES} {WAIT}": "κ is whole from the start", UNBOUND: "without π", NO_LOOK: "without look-ahead",
}  # fmt: skip


def ours(settings: str) -> str:
    """The settings of a run of this server."""
    return f"rate={RATE} {settings}"


def runs(questions: Iterable[str]) -> list[Run]:
    """The runs for these questions, each once, in the order of the questions and of their seeds."""
    return list(dict.fromkeys(run for one in questions for run in sorted(QUESTIONS[one], key=lambda run: run.seed)))
