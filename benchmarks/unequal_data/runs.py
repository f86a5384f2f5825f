"""The runs: ten workers on MNIST, of which the last alone has the digits 8 and 9, and is slower than the others."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Vector
from gem_server.core.releases import WAIT_ROUNDS
from gem_worker.tasks import Task
from torch.utils.data import DataLoader, Subset

from benchmarks.finals.apart import Rule
from benchmarks.finals.clock import SIZES, Clock, Event, Policy
from benchmarks.lib.results import Store, finite, restored
from benchmarks.many_workers.order import Turn
from benchmarks.many_workers.simulation import Model, Row, train
from benchmarks.versus.profiles import Profile

Numbers = npt.NDArray[np.int64]
WORKERS, GRADIENTS, BATCH = 10, 4000, 64
RARE = (8, 9)
SLOWER = (1, 3, 10)  # times that the last worker takes as long for a gradient as each of the others
CHOICE_SEED, SEEDS = 100, range(10)  # a rate is chosen on the first, and results are of the others
FEWEST = 3  # seeds that a reported mean has at least
IN_STEP = Policy(smallest=1 / 16, wait=0.15, until=WAIT_ROUNDS)  # the server's defaults around AdamW
GROWTH = 10.0  # of κ; so is this


@dataclass(frozen=True)
class Method:
    """A rule, and the rates that it is tried at.

    Attributes:
        synchronous: All wait for the last, and take one step together.
        in_step: Slow workers get smaller batches, and replies wait.
    """

    label: str
    rule: str
    rates: tuple[float, ...]
    optimizer: str = "sgd"
    synchronous: bool = False
    in_step: bool = False


METHODS = {
    "gem": Method("GEM", "gem", (0.015, 0.03, 0.05, 0.15)),
    "in step": Method("GEM around AdamW, in step", "gem", (0.0003, 0.001, 0.003, 0.01), in_step=True),
    "adamw": Method("GEM around AdamW, whole batches", "gem", (0.0003, 0.001, 0.003, 0.01), optimizer="adamw"),
    "downpour": Method("DOWNPOUR", "downpour", (0.015, 0.03, 0.05, 0.1, 0.2)),
    "dana": Method("DANA", "dana", (0.0015, 0.005, 0.015, 0.05)),
    "adaptive": Method("adaptive staleness", "adaptive", (0.05, 0.15, 0.5, 1.5)),
    "rescaled": Method("Rescaled ASGD", "rescaled", (0.0015, 0.005, 0.015, 0.05)),
    "synchronous": Method("synchronous, Nesterov's momentum", "dana", (0.005, 0.015, 0.05, 0.15), synchronous=True),
}


@dataclass(frozen=True)
class Case:
    """A run: the name of its method, how much slower the last worker is, the learning rate and the seed."""

    method: str
    slower: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What is kept of a run: held-out loss (infinite if it diverged), and the accuracies on all digits and on 8 and 9."""

    loss: float
    accuracy: float
    rare: float


def turns(slower: float, seed: int) -> Iterator[Turn]:
    """The commits of workers that do not wait. Times are exponential, with a mean of 1, or `slower` for the last worker."""
    random = np.random.default_rng([1, seed])

    def ready(worker: int) -> Iterator[tuple[float, int]]:
        now = 0.0
        while True:
            now += random.exponential(slower if worker == WORKERS - 1 else 1.0)
            yield now, worker

    for _, worker in islice(heapq.merge(*map(ready, range(WORKERS))), GRADIENTS):
        yield Turn(worker, BATCH)


def duration(slower: float) -> float:
    """The expected time of `GRADIENTS` commits of workers that do not wait."""
    return GRADIENTS / (WORKERS - 1 + 1 / slower)


def in_step(slower: float, seed: int) -> list[Event]:
    """What happens in the same time if the server keeps the workers in step."""
    profile = Profile(
        f"the last {slower:g} × slower", lambda worker, workers: slower if worker == workers - 1 else 1.0,
        lambda random, size: random.exponential(1.0, size),
    )  # fmt: skip
    return Clock(profile, WORKERS, seed, IN_STEP, duration(slower)).events()


def rounds(slower: float, seed: int) -> Iterator[Turn]:
    """The steps that workers make in the same time if they wait for each other. A step is one turn with everyone's samples."""
    random, means = np.random.default_rng([2, seed]), np.array([1.0] * (WORKERS - 1) + [slower])
    left = duration(slower)
    while (left := left - random.exponential(means).max()) > 0:
        yield Turn(0, BATCH * WORKERS)


class Digits:
    """Who has which samples.

    Args:
        task: MNIST.
    """

    def __init__(self, task: Task) -> None:
        self._rare, self._usual = _split(task.training_data())
        rare, _ = _split(task.test_data())
        self._held_out: Any = Subset(cast(Any, task.test_data()), rare.tolist())

    def draw(self, worker: int, count: int, random: np.random.Generator) -> list[int]:
        """A batch of one worker; or one for all, if it is larger."""
        if count <= BATCH:
            chosen = random.choice(self._rare if worker == WORKERS - 1 else self._usual, count)
        else:
            share = count // WORKERS
            chosen = np.concatenate([random.choice(self._rare, share), random.choice(self._usual, count - share)])
        return [int(each) for each in chosen]

    def score(self, model: Model, theta: Vector) -> Row:
        return model.score(theta) | {"rare": model.score(theta, self._held_out)["accuracy"]}


def _split(data: Any) -> tuple[Numbers, Numbers]:
    """The numbers of the samples with rare digits, and of the others."""
    labels = np.concatenate([labels.numpy() for _, labels in DataLoader(data, batch_size=10_000)])
    rare = np.isin(labels, RARE)
    return np.flatnonzero(rare), np.flatnonzero(~rare)


def measure(case: Case, task: Task, digits: Digits) -> Outcome:
    """Makes a run."""
    method = METHODS[case.method]
    last = _train_in_step(case, task, digits) if method.in_step else _train(case, method, task, digits)
    if "rare" not in last or not math.isfinite(last["test_loss"]):
        return Outcome(math.inf, math.nan, math.nan)
    return Outcome(round(last["test_loss"], 4), round(last["accuracy"], 4), round(last["rare"], 4))


def _train(case: Case, method: Method, task: Task, digits: Digits) -> Row:
    given: dict[str, Any] = {"rule": method.rule, "optimizer": method.optimizer, "learning_rate": case.rate, "seed": case.seed}
    given |= {"smallest_share": 1.0, "reply_wait": 0.0, "rule_options": ""}  # not in step: as it was measured
    settings = Hyperparameters(**given).with_defaults(given)
    order = list((rounds if method.synchronous else turns)(case.slower, case.seed))
    workers = 1 if method.synchronous else WORKERS
    return train(task, settings, order, workers, len(order), draw=digits.draw, last=digits.score)[-1]


def _train_in_step(case: Case, task: Task, digits: Digits) -> Row:
    random, model = np.random.default_rng(case.seed), Model(task, case.seed)

    def gradient(theta: Vector, worker: int, step: int, size: int) -> Vector:
        return model.gradient(theta, digits.draw(worker, size * BATCH // SIZES, random))[0]

    rule = Rule(case.rate, growth=GROWTH, schedule="constant")
    theta = rule.train(model.theta, in_step(case.slower, case.seed), WORKERS, gradient, lambda time, theta: False)
    return digits.score(model, theta)


def wanted(slowness: Iterable[int], known: Mapping[Case, Outcome]) -> Iterator[Case]:
    """The cases of these degrees, in the order of their use; `known` has the results of those that were wanted before."""
    for slower in slowness:
        for method, each in METHODS.items():
            yield from (Case(method, slower, rate, CHOICE_SEED) for rate in each.rates)
            rate = best_rate(method, slower, known)
            yield from (Case(method, slower, rate, seed) for seed in SEEDS)


def best_rate(method: str, slower: int, known: Mapping[Case, Outcome]) -> float:
    """The rate with the lowest held-out loss over all digits, on the seed that chooses."""
    return min(METHODS[method].rates, key=lambda rate: known[Case(method, slower, rate, CHOICE_SEED)].loss)


def reported(known: Mapping[Case, Outcome], method: str, slower: int) -> tuple[float, list[Outcome]] | None:
    """The chosen rate and its results; None if a rate was not tried, or if fewer than `FEWEST` seeds have a result."""
    if any(Case(method, slower, rate, CHOICE_SEED) not in known for rate in METHODS[method].rates):
        return None
    rate = best_rate(method, slower, known)
    found = [known[case] for seed in SEEDS if (case := Case(method, slower, rate, seed)) in known]
    return (rate, found) if len(found) >= FEWEST else None


def stored(path: Path) -> Store[Case, Outcome]:
    """The stored results; what is not finite is null."""
    return Store(path, "case", Case, finite, lambda case, row: Outcome(**restored(row, loss=math.inf)))
