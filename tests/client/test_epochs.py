"""Epochs of a worker's own loop: those of the run, whoever gets how much of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from client.sampler_helpers import SAMPLES, Numbers, run_to_its_end, settings
from gem_client import InvalidRequest, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.server import config, serving
from torch import nn
from torch.optim.lr_scheduler import StepLR

EPOCHS = 4


class Worker:
    """A worker with a model of three parameters, whose gradient is always 1."""

    def __init__(self, address: str, name: str = "a", batches_per_step: int = 1) -> None:
        self.session = connect(address, name=name)
        self.weight = nn.Parameter(torch.zeros(3))
        self.optimizer = Optimizer(
            torch.optim.SGD([("w", self.weight)], lr=0.05), self.session, batches_per_step=batches_per_step
        )
        self.sampler = ShardSampler(self.session, Numbers(SAMPLES))

    def step(self) -> None:
        self.accumulate()
        self.optimizer.step()

    def accumulate(self) -> None:
        self.weight.grad = torch.ones(3)


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.long)])
def test_each_epoch_has_each_sample_once(processes: int) -> None:
    with serving(config(settings(epochs=EPOCHS))) as live:
        worker = Worker(live.address)
        seen: list[tuple[int, list[int]]] = []
        for epoch in worker.sampler.epochs():
            seen.append((epoch.number, []))
            for batch in epoch.loader(num_workers=processes):
                seen[-1][1].extend(batch.tolist())
                worker.step()
        assert [number for number, _ in seen] == list(range(EPOCHS))
        assert all(sorted(samples) == list(range(SAMPLES)) for _, samples in seen)
        assert worker.sampler.complete
        worker.session.close()


def test_workers_share_an_epoch_and_a_later_one_begins_in_that_of_the_run() -> None:
    with serving(config(settings(epochs=EPOCHS))) as live:
        early = Worker(live.address)
        seen = Counter[tuple[int, int]]()
        first_of_late = []

        def train_late() -> None:
            worker = Worker(live.address, "b")
            scheduler = StepLR(worker.optimizer, 1, gamma=0.5)
            for epoch in worker.sampler.epochs(scheduler):
                first_of_late.append((epoch.number, worker.optimizer.param_groups[0]["lr"]))
                for batch in epoch.loader():
                    seen.update((epoch.number, sample) for sample in batch.tolist())
                    worker.step()
            worker.session.close()

        for epoch in early.sampler.epochs():
            for batch in epoch.loader():
                seen.update((epoch.number, sample) for sample in batch.tolist())
                early.step()
            if epoch.number == 1:
                break
        early.session.close()
        run_to_its_end(train_late)
        number, rate = first_of_late[0]
        assert number == 2
        assert rate == pytest.approx(0.05 * 0.5**2)
        assert seen == Counter({(epoch, sample): 1 for epoch in range(EPOCHS) for sample in range(SAMPLES)})


def test_an_epoch_ends_before_the_batches_that_wait_for_a_step() -> None:
    """Seven batches an epoch, in steps of two."""
    with serving(config(settings(epochs=2))) as live:
        worker, steps = Worker(live.address, batches_per_step=2), []
        for epoch in worker.sampler.epochs():
            for number, _ in enumerate(epoch.loader(), 1):
                worker.accumulate()
                if number % 2 == 0:
                    worker.optimizer.step()
            worker.optimizer.finish()
            steps.append((epoch.number, worker.session.steps_done))
        assert steps == [(0, 4), (1, 8)]
        assert live.on_loop(lambda: live.core.samples_committed) == 2 * SAMPLES
        worker.session.close()


def test_what_is_left_of_an_epoch_is_the_next_one() -> None:
    with serving(config(settings(epochs=2))) as live:
        worker, numbers, samples = Worker(live.address), [], 0
        for epoch in worker.sampler.epochs():
            numbers.append(epoch.number)
            for count, batch in enumerate(epoch.loader(), 1):
                worker.step()
                samples += len(batch)
                if count == 5:
                    break
        assert numbers == [0, 0, 1, 1]
        assert samples == 2 * SAMPLES
        worker.session.close()


def test_batches_that_never_get_a_step_end_the_loop_with_an_error() -> None:
    """A loop that accumulates and forgets `finish`: the last batch comes three times."""
    with serving(config(settings(epochs=1))) as live:
        worker = Worker(live.address, batches_per_step=2)

        def train() -> None:
            for epoch in worker.sampler.epochs():
                for number, _ in enumerate(epoch.loader(), 1):
                    worker.accumulate()
                    if number % 2 == 0:
                        worker.optimizer.step()

        with pytest.raises(InvalidRequest, match="never got a step"):
            run_to_its_end(train)
