"""What a session makes of the share that the server asks for, and what its commits say of theirs."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from client.sampler_helpers import Numbers, joined, settings, train_each
from client.share_helpers import Asking, asking_for_half
from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import rate
from gem_client import InvalidRequest, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.model import GRADIENT
from kit.server import config, serving
from torch import nn

SHARED = settings(smallest_share=1 / 16, shard_size=64)  # whole batches of 4 samples
FALLING = {"schedule": "cosine", "decay_versions": 10}


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Asking:
    return asking_for_half(monkeypatch)


def test_the_next_batch_follows_the_last_commits_result_and_a_new_lease_begins_with_whole_ones(asking: Asking) -> None:
    with serving(config(SHARED)) as live, joined(live, "a") as session:
        assert session.batch_share == 1
        batches = train_each(session, session.shards(64))
        assert [len(next(batches)) for _ in range(4)] == [4, 2, 2, 2]
        assert session.batch_share == 0.5
        live.on_loop(lambda: live.core.leave(session._member.lease_id))
        assert session.commit(GRADIENT).lost
        assert session.batch_share == 1
        asking.answer["batch_share"] = 0.25
        session.commit(GRADIENT)
        assert session.batch_share == 0.25
    assert asking.told[:4] == [1.0, 0.5, 0.5, 0.5]


def test_an_older_server_asks_for_whole_batches_and_counts_versions(asking: Asking) -> None:
    asking.answer.clear()
    with serving(config(settings(**FALLING, smallest_share=1 / 16))) as live, joined(live, "a") as session:
        session.commit(GRADIENT)
        assert session.batch_share == 1
        assert session.learning_rate == rate(session.hyperparameters, 1)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_learning_rate_follows_progress_and_the_optimizer_shows_it(asking: Asking, overlap: bool) -> None:
    asking.answer["progress"] = 2.75
    with serving(config(settings(**FALLING, smallest_share=1 / 16))) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session, overlap=overlap)
        assert session.learning_rate == rate(session.hyperparameters, 0)
        parameter.grad = torch.ones(3)
        optimizer.step()
        optimizer.finish()
        assert optimizer.param_groups[0]["lr"] == session.learning_rate == rate(session.hyperparameters, 2.75)
        optimizer.step()  # its own rate is not refused


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_loop_with_batches_of_its_own_says_the_share_of_each(asking: Asking, overlap: bool) -> None:
    with serving(config(SHARED)) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session, overlap=overlap)
        for share in (None, 0.25, 1):
            parameter.grad = torch.ones(3)
            optimizer.step(share=share)
        optimizer.finish()
        assert asking.told == [0.0, 0.25, 1.0]
        with pytest.raises(InvalidRequest, match=r"share is the share of a whole batch, above 0 and at most 1, not 0"):
            optimizer.step(share=0)


def test_a_loop_that_keeps_whole_batches_is_told_once(asking: Asking, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gem_client")
    with serving(config(SHARED)) as live, joined(live, "a") as session:
        for share in (None, 0.5, None, None):
            session.commit(GRADIENT, share=share)
    lines = [record.message for record in caplog.records if "stay whole" in record.message]
    assert lines == [
        "this loop's batches stay whole, although the server asks for the share 0.5 of them: to follow it, ask "
        "session.batch_share and tell each commit its share"
    ]
    assert asking.told == [0.0, 0.5, 0.0, 0.0]


@pytest.mark.long
def test_with_loading_processes_batches_follow_after_what_was_read_ahead(asking: Asking) -> None:
    run = Hyperparameters(batch_size=8, shard_size=64, epochs=1, smallest_share=1 / 16)
    with serving(config(run)) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session)
        sampler, sizes = ShardSampler(session, Numbers(128)), []
        for batch in sampler.loader(num_workers=2):
            sizes.append(len(batch))
            parameter.grad = torch.zeros(3)
            optimizer.step()
        ahead = 2 * 2  # processes times DataLoader's prefetch_factor, and the one that the loop has
        assert sizes[: ahead + 1] == [8] * (ahead + 1)
        assert set(sizes[ahead + 1 :]) == {4}
        assert asking.told == [size / 8 for size in sizes]
        assert sum(sizes) == live.on_loop(lambda: live.core.samples_committed) == 128
        assert np.array_equal(session.theta, np.zeros(3, np.float32))
