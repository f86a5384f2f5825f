"""The same trainings with real processes, whose steps take simulated times: this server and its SDK, PyTorch DDP, and rounds
with backup workers on shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.finals import plan as simulated
from benchmarks.finals import together
from benchmarks.finals.apart import WARMUP
from benchmarks.finals.clock import SIZES, Clock
from benchmarks.finals.page import Losses
from benchmarks.finals.runs import Outcome, Run, limit_of, settings_of, take_policy, take_team
from benchmarks.lib.results import plain
from benchmarks.versus.profiles import KINDS
from benchmarks.versus.race import raced

OURS, ROUNDS = "real ours", "real rounds"
# The same with a schedule as long as if exchanges cost nothing, which the end of the run cuts short.
CUT_OURS, CUT_ROUNDS = "cut ours", "cut rounds"
_BOTH, _CUT = ((OURS, ROUNDS), (CUT_OURS, CUT_ROUNDS)), ((CUT_OURS, CUT_ROUNDS),)
_POINTS = 100  # of a stored curve

_REACHED = 0.95  # of the commits that the simulated clock foretells: about what this server made in runs before (0.91 to 0.98)
_RATE = 0.015  # of rounds, if the simulation has not found a better one
_PLACES = (  # models, numbers of workers, kinds of clusters, seeds, lengths of the schedule
    ("transformer", 8, simulated.HARD, (0, 1, 2), _BOTH),
    ("large", 8, simulated.EQUAL_AND_MIXED, (0,), _BOTH),
    ("transformer", 8, simulated.OTHERS, (0,), _CUT),
    ("transformer", 16, simulated.THREE, (0,), _CUT),
    ("transformer", 4, simulated.THREE, (0,), _CUT),
    ("convnet", 8, simulated.THREE, (0,), _CUT),
)


def runs(results: Mapping[Run, Outcome]) -> list[Run]:
    """The runs, most valuable first. Rounds, and the convolutional network, have the rate that was best in the simulation of
    the same cluster."""
    losses = Losses(results)
    found = []
    for model, workers, profiles, seeds, lengths in _PLACES:
        for (ours, rounds), seed, profile in product(lengths, seeds, profiles):
            where, cell = (model, profile, workers, seed, 200), (model, profile, workers, 200)
            both = simulated.BOTH
            rate, _ = losses.best(cell, "ours", both) if model in simulated.OTHER_RATES else ("", [])
            found.append(Run(*where, ours, f"rate={rate} {both}" if rate else simulated.ours(both)))
            # DDP has no result if workers are killed: torchrun's agents gave up whenever that was tried.
            for team in simulated.designs(profile, workers).values() if not KINDS[profile].killed_every else ():
                rate, _ = losses.best(cell, "rounds", team)
                found.append(Run(*where, rounds, f"rate={rate or _RATE} {team}".strip()))
    return found


def make(run: Run, data: Path | None) -> Outcome:
    """Makes a run. Raises RunFailed."""
    limit, more = limit_of(run), race_of(run)
    found = raced(
        run.profile, contender="gem" if run.method in (OURS, CUT_OURS) else "ddp", model=run.model, workers=run.workers,
        rate=settings_of(run)["rate"], seed=run.seed, limit=limit, data=data, **more,
    )  # fmt: skip
    _, loss, samples, exchanges = found["curve"][-1]
    rounds = samples / (SIZES * more["first"] if more["first"] else sum(more["sizes"]))
    places = np.linspace(0, len(found["curve"]) - 1, min(_POINTS, len(found["curve"]))).round().astype(int)
    curve = tuple((time, plain(loss, 5)) for time, loss, _, _ in (found["curve"][place] for place in places))
    return Outcome(
        None if found["diverged"] else plain(loss, 5), None, plain(limit, 5) or 0.0, plain(samples / SIZES) or 0.0,
        exchanges if run.method in (OURS, CUT_OURS) else round(rounds), curve,
    )  # fmt: skip


def race_of(run: Run) -> dict[str, Any]:
    """The race's settings. The length of its schedule, in rounds or in commits of whole batches, follows from the cluster's
    times as if exchanges cost nothing. With `real` methods it ends with the run all the same: rounds take it as a share of the
    time; this server counts commits, and gets as many as a pilot run makes. `cut` ones end before it does."""
    given, profile = settings_of(run), KINDS[run.profile]
    if run.method in (ROUNDS, CUT_ROUNDS):
        team = take_team(given)
        done = together.rounds(team, profile, run.workers, run.seed, limit_of(run))
        cut = {"by_rounds": True} if run.method == CUT_ROUNDS else {}
        return cut | {"schedule": len(done), "sizes": together.sizes(team, profile, run.workers), "first": team.first}
    policy = take_policy(given)
    events = Clock(profile, run.workers, run.seed, policy, limit_of(run)).events()
    total = sum(event.size for event in events) / SIZES * (1 if run.method == CUT_OURS else _REACHED)
    warm = round(WARMUP * total)
    settings = {
        "rule": f"gem:growth={given.get('growth', 0)}",
        "schedule": f"cosine:versions={round(total) - warm},warmup={warm},factor=0",
        "smallest_share": policy.smallest, "reply_wait": policy.wait,
    }  # fmt: skip
    return {"schedule": total, "sizes": [SIZES] * run.workers, "first": 0, "settings": settings}
