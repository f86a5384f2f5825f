"""What docs/rules.md says about skewed noise: the paper's rule misses a mean of rare large samples, AdamW does not."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_server.rules import rule_of
from rules.passes import Run

WORKERS, COPIES, RARE = 8, 1000, 0.05


def learned(samples: int, **settings: str | float) -> float:
    """The mean over many copies of θ, each of which learns the mean of samples that are 1 with probability 0.05 and else 0.
    Workers commit in random order."""
    chosen = Hyperparameters(**settings).with_defaults(settings)  # type: ignore[arg-type]
    run, random = (
        Run.of(rule_of(chosen), np.full(COPIES, RARE, np.float32), WORKERS),
        np.random.default_rng(0),
    )  # at the optimum
    bases, late = [0] * WORKERS, []
    for version in range(1600):
        worker = int(random.integers(WORKERS))
        theta = run.workers[worker][run.rule.reply_buffer]
        gradient = theta - random.binomial(samples, RARE, COPIES).astype(np.float32) / np.float32(samples)
        run.commit(gradient.astype(np.float32), worker, version - bases[worker])
        bases[worker] = version + 1
        if version >= 1200:
            late.append(float(run.theta.mean()))
    return float(np.mean(late))


def test_the_papers_rule_is_biased_where_noise_is_skewed() -> None:
    assert learned(1, learning_rate=0.01) < 0.75 * RARE
    assert learned(64, learning_rate=0.01) == pytest.approx(RARE, rel=0.05)


def test_adamw_is_not_with_batches_and_rules_that_are_linear_in_the_gradient_never() -> None:
    assert learned(8, learning_rate=0.001, optimizer="adamw", weight_decay=0.0) == pytest.approx(RARE, rel=0.05)
    assert learned(1, learning_rate=0.01, rule="downpour") == pytest.approx(RARE, rel=0.05)
    assert learned(1, learning_rate=0.001, rule="dana") == pytest.approx(RARE, rel=0.05)
