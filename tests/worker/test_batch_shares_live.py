"""Two workers of unlike speed against a real server that asks for batches in proportion."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from statistics import median
from typing import Any

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import Retry, connect
from gem_client.run.link import Link
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.step_limits import StepLimits
from gem_worker.process.trainer import run_hyperparameters, train
from kit.model import in_background
from kit.server import config, serving
from kit.task import SAMPLES, Line
from prometheus_client.registry import CollectorRegistry

SECONDS = {"fast": 0.05, "slow": 0.15}  # that a whole batch takes
RUN = Hyperparameters(rule="downpour", learning_rate=0.01, batch_size=16, shard_size=32, smallest_share=1 / 16, seed=5)


@pytest.mark.long
def test_a_worker_that_is_three_times_slower_gets_batches_of_about_a_third_and_commits_as_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, attempt = defaultdict[str, list[float]](list), Link.attempt

    def noted(self: Link, header: pb.CommitHeader, *arguments: Any) -> pb.CommitResult:
        shares[self.caller.name].append(header.batch_share)
        assert header.batch_share == header.sample_count / RUN.batch_size
        return attempt(self, header, *arguments)

    monkeypatch.setattr(Link, "attempt", noted)
    epochs = -(-200 * RUN.batch_size // SAMPLES)
    settings = Hyperparameters(**{**vars(RUN), "epochs": epochs})
    with serving(config(settings, min_workers=2)) as live:

        def work(name: str) -> int:
            with connect(live.address, name=name) as session:
                known, limits = run_hyperparameters(live.address, Retry()), StepLimits(SECONDS[name])
                return train(Line(), session, known, WorkerMetrics(CollectorRegistry()), limits=limits)

        workers = {name: in_background(partial(work, name)) for name in SECONDS}
        commits = {name: worker.result(120) for name, worker in workers.items()}
        assert live.on_loop(lambda: live.core.complete)
        assert live.on_loop(lambda: live.core.samples_committed) == epochs * SAMPLES
        assert live.on_loop(lambda: live.core.central.progress) == pytest.approx(epochs * SAMPLES / RUN.batch_size)
    settled = {name: median(told[10:]) for name, told in shares.items()}
    assert settled["fast"] == 1
    assert 1 / 4 <= settled["slow"] <= 1 / 2
    assert 0.6 < commits["slow"] / commits["fast"] < 1.5
