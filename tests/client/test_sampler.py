"""What one worker gets from the SDK's sampler: every sample of every epoch, in batches, to the end of the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from client.sampler_helpers import SAMPLES, ZERO, Numbers, joined, ledger, run_to_its_end, settings, train_all, train_each
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, NonFiniteGradient, Session, connect
from gem_client.run.shards import Shards
from gem_client.torch import Optimizer, ShardSampler
from kit.model import SIZE
from kit.server import Live, config, serving
from torch import nn
from torch.utils.data import DataLoader

# -- one worker


@pytest.mark.parametrize("mode", ["partition", "replicate"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_one_worker_sees_every_sample_of_every_epoch_once(mode: str, epochs: int) -> None:
    with serving(config(settings(epochs=epochs, shards=mode))) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session)
        data = Numbers(SAMPLES)
        seen: list[int] = []
        for batch in DataLoader(data, batch_sampler=ShardSampler(session, data)):
            seen += batch.tolist()
            parameter.grad = torch.zeros(3)
            optimizer.step()
        for epoch in range(epochs):
            assert sorted(seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
        assert ledger(live) == {
            "pending": 0,
            "leased": 0,
            "completed": 3 * epochs,
            "samples_completed": SAMPLES * epochs,
            "samples_committed": SAMPLES * epochs,
        }
        assert live.on_loop(lambda: live.core.complete)


@pytest.mark.parametrize(
    ("run", "samples", "own", "sizes"),
    [
        (settings(), SAMPLES, None, [4, 4, 2, 4, 4, 2, 3]),
        (settings(), SAMPLES, 7, [7, 3, 7, 3, 3]),
        (Hyperparameters(batch_size=512), 2048, None, [512] * 4),
    ],
    ids=["the run's", "the worker's own", "as large as the default shards"],
)
def test_batches_never_straddle_shards(run: Hyperparameters, samples: int, own: int | None, sizes: list[int]) -> None:
    with serving(config(run)) as live, joined(live, "a") as session:
        assert [len(batch) for batch in train_each(session, session.shards(samples, batch_size=own))] == sizes


def test_the_loader_ends_when_the_workers_steps_are_done() -> None:
    with serving(config(settings(steps=5, epochs=0))) as live:
        with joined(live, "a") as session:
            assert sum(train_all(session, session.shards(SAMPLES)).values()) == 4 + 4 + 2 + 4 + 4
            assert session.steps_done == 5
            assert list(Shards(session._member, session._side, lambda: None).open(SAMPLES, 4)) == []
        with joined(live, "a") as back:
            assert list(back.shards(SAMPLES)) == []
        with joined(live, "b") as other:
            assert len(list(train_each(other, other.shards(SAMPLES)))) == 5


def test_steps_count_from_where_the_worker_left_off() -> None:
    with serving(config(settings(steps=5, epochs=0))) as live:
        with joined(live, "a") as session:
            session.commit(ZERO)
            session.commit(ZERO)
        with joined(live, "a") as back:
            assert len(list(train_each(back, back.shards(SAMPLES)))) == 3


@pytest.mark.parametrize(("local_steps", "batches_per_step"), [(1, 2), (3, 1), (3, 2)])
def test_a_workers_steps_are_commits_however_many_batches_each_covers(local_steps: int, batches_per_step: int) -> None:
    """For a loop without an Optimizer, which accumulates its gradients and makes its local steps by itself."""
    with serving(config(settings(rule="agn", local_steps=local_steps, steps=4, epochs=0))) as live:
        with connect(live.address) as session:
            session.join({"w": ZERO}, batches_per_step=batches_per_step)
            assert session.batches_per_commit == local_steps * batches_per_step
            seen = [len(batch) for batch in train_windows(session, session.shards(SAMPLES))]
            assert (len(seen), session.steps_done) == (4 * local_steps * batches_per_step, 4)
        assert ledger(live)["samples_committed"] == sum(seen)


def train_windows(session: Session, batches: Shards) -> Iterator[list[int]]:
    """Commits the batches of a window together. Those of one accumulation need not be counted by the loop."""
    while not batches.complete:
        for number, batch in enumerate(batches, 1):
            yield batch
            if number % session.batches_per_commit == 0:
                windows = session.hyperparameters.local_steps > 1
                session.commit(ZERO, batches=session.batches_per_commit if windows else None)


def test_a_batch_whose_gradient_was_refused_does_not_keep_the_run_from_its_end() -> None:
    def train(session: Session) -> int:
        refused = 0
        for number, _ in enumerate(session.shards(SAMPLES)):
            try:
                session.commit(np.full(SIZE, np.nan if number == 1 else 0.0, np.float32))
            except NonFiniteGradient:
                refused += 1
        return refused

    with serving(config(settings())) as live, joined(live, "a") as session:
        assert run_to_its_end(lambda: train(session)) == 1


# -- how many batches there are


def test_the_length_of_a_loader_is_what_this_worker_can_get_at_most() -> None:
    with serving(config(settings(epochs=2))) as live, joined(live, "a") as session:
        sampler = ShardSampler(session, Numbers(SAMPLES))
        assert len(sampler.loader()) == len(DataLoader(Numbers(SAMPLES), batch_sampler=sampler)) == 14
        assert len(list(train_each(session, sampler))) == 14
    with serving(config(settings(epochs=0, steps=5))) as live, joined(live, "a") as session:
        session.commit(ZERO)
        assert len(ShardSampler(session, Numbers(SAMPLES))) == 4
    with serving(config(settings(epochs=0), until_stopped=True)) as live, joined(live, "a") as session:
        endless = ShardSampler(session, Numbers(SAMPLES))
        with pytest.raises(TypeError, match="neither epochs nor steps"):
            len(endless)


# -- what is refused


def test_a_session_hands_out_shards_once(live: Live) -> None:
    with joined(live, "a") as session:
        session.shards(SAMPLES)
        with pytest.raises(InvalidRequest, match="already"):
            session.shards(SAMPLES)


def test_a_sampler_refuses_copies_and_batches_in_another_order(live: Live) -> None:
    """A batch that overtakes another would complete it."""
    with joined(live, "a") as session:
        sampler = ShardSampler(session, Numbers(SAMPLES))
        with pytest.raises(InvalidRequest, match="in_order=False is not available"):
            sampler.loader(num_workers=2, in_order=False)
        sampler.loader(in_order=True)
        with pytest.raises(InvalidRequest, match="a sampler can't be copied or pickled"):
            copy.deepcopy(sampler)


def test_shards_end_with_their_session(live: Live) -> None:
    with joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
    with pytest.raises(InvalidRequest, match="closed"):
        run_to_its_end(lambda: next(batches))
