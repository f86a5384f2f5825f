"""Two models in one process: a server and a session for each. The first server deals the data, the second has no sampler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from threading import Barrier

import pytest
import torch
from client.sampler_helpers import SAMPLES, Numbers, settings
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, LayoutMismatch, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.model import expire_all, in_background, theta, version, workers
from kit.server import DEADLINE, Live, config, serving, wait_until
from torch import nn

ENDLESS = Hyperparameters(epochs=0, steps=1_000_000)  # --until-stopped
BATCHES = 7
OWN_SERVER = r"another model needs a gem-server of its own, on another port \(--listen\)"


@pytest.fixture
def servers() -> Iterator[tuple[Live, Live]]:
    with serving(config(settings(epochs=2))) as first, serving(config(ENDLESS)) as second:
        yield first, second


class Pair:
    """A worker with two models, of three and of two parameters, whose gradients are always 1."""

    def __init__(self, servers: tuple[Live, Live], opened: ExitStack) -> None:
        self.weights = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
        sessions = [opened.enter_context(connect(live.address)) for live in servers]
        self.optimizers = [Optimizer([("w", w)], session) for w, session in zip(self.weights, sessions, strict=True)]
        self.sampler = ShardSampler(sessions[0], Numbers(SAMPLES))

    def step(self) -> None:
        for weight, optimizer in zip(self.weights, self.optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()


def test_two_workers_share_the_data_of_the_first_server_and_end_with_the_same_two_models(servers: tuple[Live, Live]) -> None:
    joined = Barrier(2)

    def train() -> Pair:
        with ExitStack() as opened:
            pair = Pair(servers, opened)
            joined.wait(DEADLINE)
            while not pair.sampler.complete:
                for _ in pair.sampler.loader():
                    pair.step()
            for optimizer in pair.optimizers:
                optimizer.load_final()
            return pair

    pairs = [worker.result(DEADLINE) for worker in [in_background(train) for _ in range(2)]]
    for number, live in enumerate(servers):
        assert version(live) == 2 * BATCHES, "each model has a commit for each batch"
        assert workers(live) == []
        for pair in pairs:
            assert pair.weights[number].tolist() == theta(live).tolist()


def test_an_interrupt_has_the_worker_leave_both_servers(servers: tuple[Live, Live]) -> None:
    def train() -> None:
        with ExitStack() as opened:
            pair = Pair(servers, opened)
            for _ in pair.sampler.loader():
                pair.step()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert [workers(live) for live in servers] == [[], []]
    with ExitStack() as opened:
        pair = Pair(servers, opened)
        for _ in pair.sampler.loader():
            pair.step()
        for optimizer in pair.optimizers:
            optimizer.load_final()
    assert version(servers[0]) == version(servers[1]) >= 2 * BATCHES


def test_a_lease_of_the_second_model_may_end_while_the_worker_waits_for_the_end_of_the_first(
    servers: tuple[Live, Live],
) -> None:
    with ExitStack() as opened:
        other = opened.enter_context(connect(servers[0].address))
        other.join({"w": [0.0, 0.0, 0.0]})
        pair = Pair(servers, opened)
        next(iter(pair.sampler.loader()))
        pair.step()
        first, second = pair.optimizers
        waiting = in_background(first.load_final)
        wait_until(lambda: workers(servers[0]) == [other.name], "the worker to leave the first run")
        expire_all(servers[1])
        other.close()
        waiting.result(DEADLINE)
        second.load_final()
        assert pair.weights[1].tolist() == theta(servers[1]).tolist() != [0.0, 0.0]


def test_a_second_model_on_a_server_or_a_session_is_told_what_it_needs(servers: tuple[Live, Live]) -> None:
    with connect(servers[0].address) as session, connect(servers[0].address) as another:
        Optimizer(nn.Linear(2, 2).named_parameters(), session)
        with pytest.raises(
            InvalidRequest, match=r"Another model needs a gem-server of its own.*several optimizers.* one class"
        ):
            Optimizer(nn.Linear(2, 2).named_parameters(), session)
        for model in (nn.Linear(3, 2), nn.Linear(2, 2, bias=False)):
            with pytest.raises(LayoutMismatch, match=OWN_SERVER):
                Optimizer(model.named_parameters(), another)
