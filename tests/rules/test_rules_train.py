"""Every rule trains the digits through the real service, two workers at once, with local steps and without."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_api.rules import RULES
from gem_client import Retry, connect
from gem_worker.evaluation.evaluate import Evaluator
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.trainer import run_hyperparameters, train
from gem_worker.tasks.digits import Digits
from kit.model import in_background, outcomes
from kit.server import DEADLINE, Live, config, serving
from prometheus_client.registry import CollectorRegistry

# Where its defaults are for more workers or more commits than these.
OPTIONS = {"aeasgd": "alpha=0.45", "fedasync": "mixing=0.9", "fedbuff": "buffer_size=2", "diloco": "delay=2"}
COMMITS = 60  # of each worker


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits(None)


def work(live: Live, task: Digits, name: str) -> int:
    with connect(live.address, name=name) as session:
        return train(task, session, run_hyperparameters(live.address, Retry()), WorkerMetrics(CollectorRegistry()))


def loss_of(live: Live, task: Digits) -> float:
    """On held-out data, at the present θ."""
    with connect(live.address) as reader:
        values = reader.pull()
        return Evaluator(task).score(reader.version, reader.layout, values).loss


QUICK = [("gem", 1), ("gem", 4), ("agn", 4), ("diloco", 4)]  # the others with `make test-slow`


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "local_steps"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow], id=f"{case[0]}-{case[1]}")
        for case in product(RULES, (1, 4))
    ],
)
def test_the_loss_falls(digits: Digits, rule: str, local_steps: int) -> None:
    torch.manual_seed(0)
    settings = Hyperparameters(
        rule=rule, rule_options=OPTIONS.get(rule, ""), local_steps=local_steps, steps=COMMITS, epochs=0, batch_size=16,
        shards="replicate", learning_rate=0.1, weight_decay=1e-4, warmup_versions=4, schedule="cosine",
        decay_versions=4 * COMMITS,
    )  # fmt: skip
    with serving(config(settings)) as live, connect(live.address) as first:
        first.join({name: value.detach().numpy() for name, value in digits.model().named_parameters()})
        before = loss_of(live, digits)
        others = [in_background(lambda name=name: work(live, digits, name)) for name in ("ann", "bob")]  # type: ignore[misc]
        assert [other.result(DEADLINE) for other in others] == [COMMITS, COMMITS]
        assert sum(outcomes(live).values()) == 2 * COMMITS
        samples = live.on_loop(lambda: live.core.samples_committed)
        assert samples >= 0.9 * 2 * COMMITS * local_steps * 16  # a shard's last batch may be smaller
        assert loss_of(live, digits) < before - (1.0 if local_steps > 1 else 0.05)
