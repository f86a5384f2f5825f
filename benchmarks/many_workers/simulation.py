"""Trains a task with many simulated workers, and the server's own update rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Vector
from gem_api.schedule import eta_change, factor, rate
from gem_server.rules import RuleInput, Shared, UpdateRule, rule_of
from gem_worker.tasks import Task

from benchmarks.lib.vectors import VectorModel
from benchmarks.many_workers.order import Turn
from benchmarks.paper.sequential import score

Row = dict[str, float]
Draw = Callable[[int, int, np.random.Generator], list[int]]  # a worker's next batch: its number, the size, random numbers
STOP = object()


class Model(VectorModel):
    """The task's model."""

    def __init__(self, task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(task.model())
        self._task, self._data = task, cast(Any, task.training_data())

    def gradient(self, theta: Vector, samples: list[int]) -> tuple[Vector, float]:
        """The gradient at θ on these samples of the training data, valid until the next call, and the loss. The data take a
        list of numbers, as those of MNIST and of the digits do."""
        return self.gradient_of(theta, lambda module: self._task.loss(module, self._data[samples]))

    def score(self, theta: Vector, data: Any = None) -> Row:
        """Mean loss and share of correct answers on these data, by default all that are held out."""
        loss, accuracy = score(self._task, self.at(theta), data)
        return {"test_loss": loss, "accuracy": accuracy}

    def draw(self, worker: int, count: int, random: np.random.Generator) -> list[int]:
        """A batch of any worker: `count` samples, drawn with replacement."""
        drawn: list[int] = random.integers(0, len(self._data), count).tolist()
        return drawn


@dataclass
class Worker:
    """A worker: its buffers on the server, and its commits so far."""

    buffers: dict[str, Vector]
    base: int = 0
    commits: int = 0


def train(
    task: Task, settings: Hyperparameters, turns: Iterable[Turn], workers: int, every: int,
    tell: Callable[[Row], object] = lambda row: None, draw: Draw | None = None,
    last: Callable[[Model, Vector], Row] = Model.score,
) -> list[Row]:  # fmt: skip
    """Trains; the seed is that of the settings.

    Args:
        task: What is trained.
        settings: The run's hyper-parameters. Local steps are plain SGD. Replies may be held if the rule sends θ itself.
        turns: Whose commit comes next.
        workers: How many there are.
        every: Commits between two rows.
        tell: Called with each row; the run ends early if it returns `STOP`.
        draw: Chooses the samples of a batch; by default from all training data.
        last: Makes what the last row has besides, from the last θ.

    Returns:
        A row for every `every` commits: see `_row`. If training diverged, the last one has a loss that is not finite instead of
        what `last` makes.
    """
    random, model, rule = np.random.default_rng(settings.seed), Model(task, settings.seed), rule_of(settings)
    theta, size = model.theta, model.layout.parameters
    shared = Shared({name: np.zeros(size, np.float32) for name in rule.shared}, dict(rule.numbers))
    crowd = [Worker({name: np.zeros(size, np.float32) for name in rule.buffers}) for _ in range(workers)]
    for worker in crowd:
        rule.first_pull(theta, worker.buffers)
    draw = draw or model.draw
    rows: list[Row] = []
    current, before, version, done = defaultdict[str, list[float]](list), theta.copy(), 0, 0
    for turn in turns:
        worker = crowd[turn.worker]
        if not turn.samples:
            rule.release(theta, worker.buffers, None, 0.0)
            worker.base = version
            continue
        done += 1
        batch = partial(draw, turn.worker, turn.samples, random)
        update, loss = _update(model, worker.buffers[rule.reply_buffer], worker.base, rule, settings, batch)
        if not np.isfinite(update).all():
            return [*rows, {"version": version, "loss": float("nan")}]
        now = factor(settings, version)
        then = factor(settings, worker.base - 1) if worker.commits else now
        rule_input = RuleInput(version - worker.base, version, worker.commits, now, len(crowd), shared, eta_change(now, then))
        if rule.accepts(rule_input):
            facts = rule.apply(model.layout, theta, update, worker.buffers, rule_input)
            version += 1
            worker.commits += 1
        else:
            rule.pull(theta, worker.buffers)
            facts = None
        worker.base = version
        current["loss"].append(loss)
        current["staleness"].append(rule_input.staleness)
        if facts is not None:
            for name, value in (("pi_median", facts.median), ("still", facts.zero_ratio), ("proxy", facts.proxy_energy)):
                current[name].append(value)
        if done % every == 0:
            rows.append(_row(version, theta, before, current) | _moments(rule, crowd, settings.kappa))
            if tell(rows[-1]) is STOP:
                break
            current.clear()
            before = theta.copy()
    rows[-1] |= last(model, theta)
    return rows


def _update(
    model: Model, theta: Vector, base: int, rule: UpdateRule, settings: Hyperparameters, batch: Callable[[], list[int]]
) -> tuple[Vector, float]:
    """What a worker with θ of version `base` commits after its local steps, and their mean loss: the mean of its gradients, or
    what they moved."""
    if settings.local_steps == 1 and rule.kind == "gradient":
        return model.gradient(theta, batch())
    x, total, losses, eta = theta.copy(), np.zeros_like(theta), 0.0, np.float32(rate(settings, base))
    for _ in range(settings.local_steps):
        gradient, loss = model.gradient(x, batch())
        total += gradient
        x -= eta * gradient
        losses += loss
    update = total / np.float32(settings.local_steps) if rule.kind == "gradient" else x - theta
    return update, losses / settings.local_steps


def _row(version: int, theta: Vector, before: Vector, current: Mapping[str, list[float]]) -> Row:
    """The state after `version` commits. loss, staleness, staleness_sd, pi_median, still (the share with π = 0) and
    proxy (½Σ(κm)² of a commit) are means since the last row; moved is ½Σ(θ − θ then)²."""
    moved = float(0.5 * ((theta - before).astype(np.float64) ** 2).sum())
    means = {name: float(np.mean(values)) for name, values in current.items()}
    return {"version": version, **means, "staleness_sd": float(np.std(current["staleness"])), "moved": moved}


def _moments(rule: UpdateRule, crowd: list[Worker], kappa: float) -> Row:
    """Energies ½Σ(κ·…)² of the workers' mean moment, and of the largest |m| of any worker in each parameter."""
    if "moment" not in rule.buffers:
        return {}
    total, largest = np.zeros_like(crowd[0].buffers["moment"]), np.zeros_like(crowd[0].buffers["moment"])
    for worker in crowd:
        total += worker.buffers["moment"]
        np.maximum(largest, np.abs(worker.buffers["moment"]), out=largest)
    energies = {"mean_moment": total / np.float32(len(crowd)), "largest_moment": largest}
    return {name: float(0.5 * kappa**2 * (values.astype(np.float64) ** 2).sum()) for name, values in energies.items()}
