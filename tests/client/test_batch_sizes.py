"""How shards are cut into batches whose sizes vary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client.sampler_helpers import SAMPLES, joined, settings, train_all, train_each
from gem_client.run.batch_sizes import batch_sizes
from hypothesis import given
from hypothesis import strategies as st
from kit.server import config, serving

VARIATIONS = (0.0, 0.1, 0.5, 0.9)


@given(
    samples=st.integers(1, 5000), batch=st.integers(1, 300), variation=st.sampled_from(VARIATIONS), seed=st.integers(0, 1000),
    together=st.integers(1, 9),
)  # fmt: skip
def test_a_shard_is_cut_into_as_many_batches_as_without_variation(
    samples: int, batch: int, variation: float, seed: int, together: int
) -> None:
    sizes = batch_sizes(samples, batch, variation, np.random.default_rng(seed), together)
    assert sum(sizes) == samples
    assert len(sizes) == -(-samples // batch)
    assert min(sizes) >= 1
    assert max(sizes) <= batch * (1 + variation) + 1


def test_sizes_are_uniform_wherever_in_the_shard() -> None:
    random = np.random.default_rng(1)
    drawn = np.array([batch_sizes(256, 64, 0.9, random) for _ in range(4000)])
    assert (drawn.min(), drawn.max()) == (6, 122)
    assert drawn.mean(axis=0) == pytest.approx(64, rel=0.03)
    assert drawn.std(axis=0) == pytest.approx((122 - 6) / 12**0.5, rel=0.15)  # that of a uniform distribution


@pytest.mark.parametrize(("local_steps", "batch_size"), [(1, 64), (4, 256), (8, 300), (4, 1)])
def test_commits_vary_with_the_default_shards_whatever_the_local_steps_and_the_batch(local_steps: int, batch_size: int) -> None:
    run = settings(batch_size=batch_size, local_steps=local_steps, batch_variation=0.9)
    commit = batch_size * local_steps
    random, samples = np.random.default_rng(2), []
    for _ in range(200):
        commits = np.reshape(batch_sizes(run.default_shard_size, batch_size, 0.9, random, local_steps), (-1, local_steps))
        assert (commits.max(axis=1) - commits.min(axis=1)).max() <= 1
        samples += commits.sum(axis=1).tolist()
    assert np.mean(samples) == commit
    if batch_size > 1:  # a single sample can't vary
        assert np.std(samples) / commit == pytest.approx(0.9 / 3**0.5, rel=0.15)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            {"shard_size": 8, "local_steps": 2, "batch_variation": 0.5},
            "a commit takes a whole shard of 8 samples; start the run with shard_size 32 or more",
        ),
        (
            {"batch_size": 1, "batch_variation": 0.9},
            "batches of 1 are too small for batch_variation 0.9: start the run with a larger --batch-size",
        ),
    ],
)
def test_batches_that_can_not_vary_are_reported(run: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(config(settings(**run))) as live, joined(live, "a") as session:
        session.shards(SAMPLES)
    assert words in caplog.text


def test_workers_get_batches_of_varied_size_and_each_sample_once() -> None:
    varied = settings(shard_size=20, batch_variation=0.75)
    with serving(config(varied)) as live, joined(live, "a") as session:
        shards = session.shards(SAMPLES)
        most = shards.most_batches
        sizes = [len(batch) for batch in train_each(session, shards)]
        assert live.on_loop(lambda: live.core.complete)
        assert live.on_loop(lambda: live.core.samples_committed) == SAMPLES
    assert len(sizes) == most == 6
    assert sum(sizes[:5]) == 20
    assert len(set(sizes[:5])) > 1
    assert all(1 <= size <= 7 for size in sizes)


def test_the_sizes_differ_between_shards_and_are_those_of_the_seed() -> None:
    runs = []
    for _ in range(2):
        with serving(config(settings(shard_size=20, batch_variation=0.75, epochs=2))) as live, joined(live, "a") as session:
            runs.append([len(batch) for batch in train_each(session, session.shards(40))])
    assert runs[0] == runs[1]
    assert len({tuple(runs[0][begin : begin + 5]) for begin in range(0, 20, 5)}) > 1


def test_a_worker_can_tell_the_size_of_the_batch_that_it_has() -> None:
    with serving(config(settings(shard_size=20, batch_variation=0.75))) as live, joined(live, "a") as session:
        shards = session.shards(40)
        assert shards.samples_in_hand == 0
        seen = []
        shards.loader_tells()
        for batch in shards:
            shards.deliver()
            seen.append((shards.samples_in_hand, len(batch)))
            train_all(session, [batch])
    assert all(told == size for told, size in seen)
