"""What a step of the PyTorch optimizer imports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gem_api.hyperparameters import Hyperparameters
from kit.model import PLAIN
from kit.process import python
from kit.server import config, serving

STEP = """
import sys, torch
from gem_client import connect
from gem_client.torch import Optimizer
model = torch.nn.Linear(2, 1)
with connect(sys.argv[1]) as session:
    optimizer = Optimizer(model.named_parameters(), session)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print(session.version, sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [PLAIN, replace(PLAIN, rule="diloco", local_momentum=0.9)], ids=["gradient", "local steps"]
)
def test_training_does_not_load_pytorchs_compiler(settings: Hyperparameters) -> None:
    with serving(config(settings)) as live:
        done = python("-c", STEP, live.address)
    assert (done.returncode, done.stdout) == (0, "2 []\n"), done.stderr
