"""What workers are told of their shares of a batch, and what the server makes of those that they name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from kit.raw_client import Worker, wired
from kit.raw_ranges import serving_ranges
from kit.server import Live, config, serving

SHARED = Hyperparameters(rule="downpour", smallest_share=0.25)


def steps(live: Live, workers: dict[Worker, float], rounds: int) -> None:
    """Each worker in turn takes its seconds for a step; the others' last reply is that much older then."""
    for _ in range(rounds):
        for worker, seconds in workers.items():
            worker.pull()  # its step begins here
            live.clock.advance(seconds)
            worker.commit()


def test_a_slow_worker_is_told_its_share_and_status_shows_it_with_its_pace() -> None:
    with serving(config(SHARED)) as live, wired(live) as wire:
        fast, slow = wire.crew(2)
        steps(live, {fast: 1.0, slow: 4.0}, 3)
        slow.pull()
        live.clock.advance(4.0)
        result, _ = slow.commit()
        assert result.batch_share == 0.25
        assert result.progress == result.version
        result, _ = slow.took(slow.whole(slow.header(batch_share=0.25), *slow.body()).answer(slow.size))
        assert (result.batch_share, result.progress) == (0.25, result.version - 0.75)
        assert fast.pull()[0].progress == wire.pull(fast.size)[0].progress == result.progress
        told = {worker.name: worker for worker in wire.status().workers}
        assert told["worker 0"].pace_seconds == pytest.approx(1.0, rel=0.2)
        assert (told["worker 0"].batch_share, told["worker 1"].batch_share) == (1.0, 0.25)


def test_after_a_restart_a_worker_that_repeats_its_commit_goes_on_with_its_share(tmp_path: Path) -> None:
    logged = config(SHARED, checkpoint_dir=tmp_path, durability="log")
    with serving(logged) as live, wired(live) as wire:
        (worker,) = wire.crew(1)
        worker.took(worker.whole(worker.header(batch_share=0.5), *worker.body()).answer(worker.size))
    with serving(config(SHARED, checkpoint_dir=tmp_path, durability="log", resume=True)) as live, wired(live) as wire:
        again = Worker(wire, worker.registration)
        result, _ = again.whole(again.header(batch_share=0.5), *again.body()).answer(again.size)
        assert (result.batch_share, result.progress) == (0.5, 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_a_share_that_is_none_is_an_invalid_request(share: float) -> None:
    with serving(config(SHARED)) as live, wired(live) as wire:
        (worker,) = wire.crew(1)
        refusal = worker.whole(worker.header(batch_share=share), *worker.body()).refusal()
        assert refusal.error == "INVALID_REQUEST"
        assert worker.commit()[0].version == 1


def test_of_several_servers_the_leader_alone_names_a_share_and_all_count_that_of_the_commit(tmp_path: Path) -> None:
    with serving_ranges(tmp_path, settings=SHARED) as servers:
        results = []
        for worker in servers.started("ann"):
            result, _ = worker.whole(worker.header(batch_share=0.5), *worker.body()).answer(worker.size)
            results.append((result.batch_share, result.progress))
        assert results == [(0.5, 0.5), (0.0, 0.5)]
