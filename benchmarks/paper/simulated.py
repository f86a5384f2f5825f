"""Experiments whose workers are all simulated in one process, which chooses whose commit comes next."""

from __future__ import annotations

import math
import time
from dataclasses import asdict

import numpy as np
import torch
from gem_worker.launcher.run_folder import versions
from gem_worker.tasks import Task

from benchmarks.many_workers.order import simulated
from benchmarks.many_workers.simulation import STOP, Row, train
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.results import Result
from benchmarks.paper.statistics import CHANCE

ROWS = 20  # points of the curves
_NOTHING_LEARNED = CHANCE - 0.05


def run(experiment: Experiment, task: Task, rows: int = ROWS, hopeless: float = 1.0) -> Result:
    """Trains with as many gradients of each worker as the experiment has steps.

    Args:
        experiment: Its settings.
        task: What is trained.
        rows: Points of the curves: each has the mean loss since the one before.
        hopeless: The run ends after this share of it if nothing has been learned until then.
    """
    began, seconds, losses = time.monotonic(), list[float](), list[float]()
    torch.set_num_threads(1)
    settings = experiment.hyperparameters()
    commits = experiment.workers * experiment.commits_each

    def tell(row: Row) -> object:
        seconds.append(time.monotonic() - began)
        losses.append(row["loss"])
        return STOP if row["version"] >= hopeless * commits and min(losses) > _NOTHING_LEARNED else None

    rows_made = train(task, settings, simulated(experiment), experiment.workers, max(1, commits // rows), tell)
    last = rows_made[-1]
    diverged = not math.isfinite(last["loss"])
    seconds += [time.monotonic() - began] * diverged  # the last row was not reported
    names = ("version", "loss", "staleness", "pi_median")
    curves = {name: np.array([row.get(name, math.nan) for row in rows_made], float) for name in names}
    curves["samples"] = curves["version"] * experiment.local_steps * experiment.batch_size
    curves["seconds"] = np.array(seconds)
    return Result(
        experiment, "diverged" if diverged else "complete", last.get("accuracy"), last.get("test_loss"),
        time.monotonic() - began, curves, {}, {}, asdict(settings), versions(),
    )  # fmt: skip
