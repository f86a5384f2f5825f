"""The guide's expressions for flax, Keras and scikit-learn: one worker trains as the plain program, two share a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from gem_api.hyperparameters import Hyperparameters
from kit.examples import PATIENCE, ROOT
from kit.model import version
from kit.server import config, serving

SETTINGS = Hyperparameters(epochs=10, batch_size=32, shard_size=64)
BACKENDS = [(framework, backend) for framework in ("Keras", "Keras fit") for backend in ("jax", "torch")]


@pytest.mark.long
@pytest.mark.parametrize(("framework", "backend"), [("flax nnx", ""), *BACKENDS, ("SGDClassifier", ""), ("MLPClassifier", "")])
def test_one_worker_trains_as_the_plain_program_and_two_share_a_run(framework: str, backend: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    with serving(config(SETTINGS)) as alone, serving(config(SETTINGS, min_workers=2)) as together:
        command = [sys.executable, "tests/integrations/framework_programs.py", framework, alone.address, together.address]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == 0, ended.stderr
        result = json.loads(ended.stdout.splitlines()[-1])
        assert [live.server.core.settings.optimizer for live in (alone, together)] == ["worker"] * 2
        one, *two = result["steps"]
        assert (version(alone), version(together)) == (one, sum(two))
        assert min(two) > 0
    assert result["from the plain program"] < 1e-4
    assert result["from each other"] == 0
    assert max(result["errors"]) < result["untrained"] / 2, result
