"""The peers of the benchmark compute the same as this server. Otherwise the comparison would mean nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gem_server.rules import RuleInput
from gem_server.rules.gem import Gem
from kit.core import SMALL, bits

from benchmarks.peers.contenders.equations import SETTINGS, rescaled


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_a_peers_gem_is_bit_for_bit_ours(library: ModuleType) -> None:
    rule = Gem(
        learning_rate=SETTINGS.learning_rate, momentum=SETTINGS.momentum, kappa=SETTINGS.kappa,
        epsilon=SETTINGS.epsilon, pi_max=SETTINGS.pi_max,
    )  # fmt: skip
    convert = torch.from_numpy if library is torch else np.asarray
    random = np.random.default_rng(1)
    theta, moment, snapshot = (random.normal(size=SMALL.size).astype(np.float32) for _ in range(3))
    theirs: list[Any] = [convert(array.copy()) for array in (theta, moment, snapshot)]
    for _ in range(5):
        gradient = random.normal(size=SMALL.size).astype(np.float32)
        rule.apply(SMALL, theta, gradient, {"moment": moment, "snapshot": snapshot}, RuleInput(0))
        theirs[0] += rescaled(library, theirs[0], convert(gradient.copy()), theirs[1], theirs[2])
        theirs[2][:] = theirs[0]
        assert bits(np.asarray(theirs[0])) == bits(theta)
        assert bits(np.asarray(theirs[1])) == bits(moment)
