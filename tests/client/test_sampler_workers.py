"""Shards shared by several workers, and those of a worker that dies, leaves or loses its lease."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from client.sampler_helpers import SAMPLES, ZERO, Numbers, joined, ledger, settings, train_all
from gem_client import InvalidRequest, Session, connect
from gem_client.torch import Optimizer, ShardSampler
from gem_client.torch.sampler import samples_of
from kit.model import SIZE, Array, Patience, expire_all, in_background, model, theta, workers
from kit.server import DEADLINE, config, serving, wait_until
from torch import nn
from torch.utils.data import Subset, random_split


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


# -- a random split


def parts_of(seed: int, of: Any = None) -> list[Any]:
    """A training set, and the part that is held out, as programs split them."""
    return random_split(of or Numbers(SAMPLES), [SAMPLES - 3, 3], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_another_split_than_that_of_the_other_workers_is_refused(seed: int, nested: bool) -> None:
    training, again = parts_of(0)[0], parts_of(seed)[0]
    if nested:
        training, again = Subset(training, range(15)), Subset(again, range(15))
    with serving(config(settings())) as live, joined(live, "a") as first, joined(live, "b") as second:
        assert next(iter(ShardSampler(first, training)))
        sampler = ShardSampler(second, again)
        if seed == 0:
            assert next(iter(sampler))
        else:
            with pytest.raises(InvalidRequest, match=r"other samples than that of worker 'a'.* needs the same seed"):
                next(iter(sampler))


def test_workers_that_share_no_shards_may_have_samples_of_their_own() -> None:
    with serving(config(settings(shards="replicate"))) as live, joined(live, "a") as first, joined(live, "b") as second:
        for session, seed in ((first, 0), (second, 1)):
            assert next(iter(ShardSampler(session, parts_of(seed)[0])))


def test_samples_that_are_not_known_are_compared_with_nobodys() -> None:
    held_out = Subset(Numbers(SAMPLES), range(20))
    with serving(config(settings())) as live, joined(live, "a") as first, joined(live, "b") as second:
        assert next(iter(ShardSampler(first, held_out)))
        assert next(iter(ShardSampler(second, Numbers(20))))
    assert samples_of(Subset(Numbers(2), "ab")) == b""  # type: ignore[arg-type]
