"""The paper's rule in lockstep, with replies that are held so that the workers of a round compute on one θ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.lib.page import table
from benchmarks.many_workers.rivals import GRADIENTS, RULES, Outcomes, first
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import LOCKSTEP

WAIT = 0.15
SEEDS = (0, 1, 2)


def cases(wait: float = WAIT) -> Iterator[Experiment]:
    """The runs; with a wait of 0 those of the rivals at the paper's rate."""
    for seed in SEEDS:
        for workers in GRADIENTS:
            yield replace(first(RULES[0], workers, LOCKSTEP), seed=seed, reply_wait=wait)


def page_table(held: Outcomes, at_once: Outcomes) -> str:
    """Test accuracies under each seed, with replies that are held and at once."""
    rows: list[list[object]] = []
    for workers in GRADIENTS:
        for name, known, wait in (("at once", at_once, 0.0), (f"held, `reply_wait` {WAIT}", held, WAIT)):
            made = [known[each].accuracy for each in cases(wait) if each.workers == workers and each in known]
            if made:
                each = ", ".join(f"{100 * accuracy:.2f} %" for accuracy in made)
                rows.append([workers, name, each, f"{100 * np.mean(made):.2f} %"])
    return table(["Workers", "Replies", "Test accuracy", "Mean"], rows)
