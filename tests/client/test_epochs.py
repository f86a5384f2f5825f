"""Epochs of a worker's own loop: those of the run, whoever gets how much of them."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import partial
from threading import Barrier

import pytest
import torch
from client.sampler_helpers import SAMPLES, Numbers, run_to_its_end, settings
from gem_client import InvalidRequest, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.model import in_background
from kit.server import DEADLINE, config, serving
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

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


def test_a_loop_that_takes_its_batches_elsewhere_is_told_instead_of_repeating_the_epoch_without_end() -> None:
    with serving(config(settings(epochs=EPOCHS))) as live:
        worker = Worker(live.address)
        epochs = worker.sampler.epochs()
        assert next(epochs) == 0
        worker.step()
        with pytest.raises(InvalidRequest, match=r"no batch of epoch 0 .* iterate over epoch.loader\(\) instead"):
            next(epochs)
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


def test_an_epoch_is_its_number() -> None:
    with serving(config(settings(epochs=2))) as live:
        worker, seen = Worker(live.address), []
        for epoch in worker.sampler.epochs():
            seen.append((epoch + 1, f"{epoch:02d}", epoch == 1, type(epoch.number)))
            for _ in epoch.loader():
                worker.step()
        assert seen == [(1, "00", False, int), (2, "01", True, int)]
        with pytest.raises(InvalidRequest, match=r"save epoch\.number"):
            pickle.dumps(epoch)
        worker.session.close()


def test_the_length_of_an_epoch_is_that_of_the_whole_one() -> None:
    with serving(config(settings(epochs=2))) as live:
        worker = Worker(live.address)
        plain = DataLoader(Numbers(SAMPLES), batch_sampler=worker.sampler)
        assert len(plain) == len(worker.sampler.loader()) == 14
        for epoch in worker.sampler.epochs():
            loader = epoch.loader()
            assert (len(loader), len(plain), len(loader.dataset)) == (7, 7, SAMPLES)  # type: ignore[arg-type]
            batches = 0
            for _ in loader:
                worker.step()
                batches += 1
            assert batches == 7
        assert len(plain) == 14
        worker.session.close()


def test_what_follows_the_last_batch_has_the_final_theta_of_all_workers() -> None:
    with serving(config(settings(epochs=EPOCHS))) as live:
        final: dict[str, torch.Tensor] = {}
        ends: list[str] = []
        both_joined = Barrier(2, timeout=DEADLINE)

        def train(name: str) -> None:
            worker = Worker(live.address, name)
            both_joined.wait()

            def end() -> None:
                worker.optimizer.load_final()
                ends.append(name)

            for epoch in worker.sampler.epochs(at_end=end):
                for _ in epoch.loader():
                    worker.step()
                if not live.on_loop(lambda: len(live.core.leases.live)):
                    assert (epoch, name in final) == (EPOCHS - 1, False)
                    final[name] = worker.weight.detach().clone()
                worker.optimizer.finish()
            worker.session.close()

        for each in [in_background(partial(train, name)) for name in "ab"]:
            each.result(DEADLINE)
        theta = torch.tensor(live.on_loop(lambda: live.core.central.theta.tolist()))
        assert all(torch.equal(value, theta) for value in final.values())
        assert final
        assert sorted(ends) == ["a", "b"]


@pytest.mark.parametrize("leaves_early", [False, True])
def test_if_batches_wait_for_finish_the_end_comes_after_the_last_epoch(leaves_early: bool) -> None:
    with serving(config(settings(epochs=2))) as live:
        worker, ended = Worker(live.address, batches_per_step=2), []
        for epoch in worker.sampler.epochs(at_end=lambda: ended.append(worker.session.steps_done)):
            for number, _ in enumerate(epoch.loader(), 1):
                worker.accumulate()
                if number % 2 == 0:
                    worker.optimizer.step()
            assert not ended
            if leaves_early and epoch == 1:
                break
            worker.optimizer.finish()
        assert ended == ([] if leaves_early else [8])
        worker.session.close()
