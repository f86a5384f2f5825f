"""Shards shared by several workers, and those of a worker that dies, leaves or loses its lease."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from client.sampler_helpers import SAMPLES, ZERO, Numbers, joined, ledger, settings, train_all
from gem_client import Session, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.model import SIZE, Array, Patience, expire_all, in_background, model, theta, workers
from kit.server import DEADLINE, config, serving, wait_until
from torch import nn


def test_the_final_model_is_the_same_for_every_worker_and_has_all_commits_in_it() -> None:
    parameter = nn.Parameter(torch.zeros(SIZE))

    def train(session: Session) -> Array:
        optimizer = Optimizer([("w", parameter)], session)
        sampler = ShardSampler(session, Numbers(SAMPLES))
        for _ in sampler.loader():
            parameter.grad = torch.ones(SIZE)
            optimizer.step()
            if session.steps_done == 4:
                break
        optimizer.load_final()
        return parameter.detach().numpy().copy()

    patience = Patience()
    with serving(config(settings())) as live, connect(live.address, name="slow") as slow:
        slow.join({"w": np.zeros(SIZE, np.float32)})
        batches = iter(slow.shards(SAMPLES))
        next(batches)
        with connect(live.address, name="fast", retry=patience.retry()) as fast:
            loaded = in_background(lambda: train(fast))
            wait_until(lambda: workers(live) == ["slow"] and patience.pauses, "the worker that is done to leave, and to wait")
            assert not loaded.done()
            slow.commit(np.ones(SIZE, np.float32))
            train_all(slow, batches)
            np.testing.assert_array_equal(loaded.result(DEADLINE), theta(live))
            np.testing.assert_array_equal(slow.pull_final(), theta(live))
        assert live.on_loop(lambda: live.core.complete)
        patience.run_out()


def test_a_worker_waits_while_others_hold_the_last_shards_and_gets_what_comes_back() -> None:
    with serving(config(settings(shard_size=100))) as live, joined(live, "holds") as holding, joined(live, "waits") as waiting:
        next(iter(holding.shards(SAMPLES)))
        seen = in_background(lambda: train_all(waiting, waiting.shards(SAMPLES)))
        assert not seen.done()
        holding.close()
        assert seen.result(DEADLINE) == Counter(range(SAMPLES))


def test_a_lost_lease_returns_the_rest_of_the_shard() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
        seen = Counter(next(batches))
        session.commit(ZERO)
        dropped = next(batches)
        expire_all(live)
        assert session.commit(ZERO).lost
        seen.update(train_all(session, batches))
        assert set(seen) == set(range(SAMPLES))
        assert all(seen[sample] >= 1 for sample in dropped)
        counts = ledger(live)
        assert (counts["samples_completed"], counts["samples_committed"]) == (SAMPLES, SAMPLES + 4)


def test_a_batch_of_the_next_lease_that_is_dropped_is_trained_on_again() -> None:
    """Asking for a shard found the lease gone: the batch in hand is of the new one, the θ it is computed on is not."""
    with serving(config(settings())) as live, joined(live, "a") as session:
        shards = session.shards(SAMPLES)
        expire_all(live)
        batches = iter(shards)
        next(batches)
        assert session.commit(ZERO).lost
        assert set(train_all(session, batches)) == set(range(SAMPLES))
        assert ledger(live)["samples_completed"] == SAMPLES


def test_the_sampler_goes_on_after_a_server_lost_everything() -> None:
    patience = Patience()
    with serving(config(settings())) as live:
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        batches = iter(session.shards(SAMPLES))
        next(batches)
        session.commit(ZERO)
        live.stop()
        with serving(config(settings(), listen=live.address)) as back, session:
            next(batches)
            assert session.commit(ZERO).lost
            assert train_all(session, batches) == Counter(range(SAMPLES))
            assert ledger(back)["samples_completed"] == SAMPLES
