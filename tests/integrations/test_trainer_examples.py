"""The examples with Lightning and Hugging Face's Trainer, as processes: a gem-server and three workers, one of them killed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from gem_client import Admin, GemError
from kit.pages import ROOT
from kit.process import PATIENCE, Process, Start, processes
from kit.server import wait_until
from kit.settings import configured
from torch.utils.data import random_split

SETTINGS = ("--epochs", "1", "--batch-size", "32", "--min-workers", "3")


def training_samples(script: str) -> int:
    """Size of the example's training set."""
    return len(random_split(run_path(script, run_name="example")["Text"](), [0.9, 0.1])[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("example", "option"), [("lightning", "--checkpoints"), ("transformers", "--output")])
def test_three_workers_complete_the_run_though_one_is_killed(tmp_path: Path, example: str, option: str) -> None:
    with processes(tmp_path) as start:
        complete_though_one_is_killed(start, tmp_path, example, option)


def complete_though_one_is_killed(start: Start, tmp_path: Path, example: str, option: str) -> None:
    listening = ("--listen", "127.0.0.1:0", "--metrics-listen", "")
    server = start(Process, "-m", "gem_server", *listening, *SETTINGS, configured(shard_size=64, lease_seconds=5))
    address = server.address
    script = str(ROOT / "examples" / example / "train.py")
    workers = [start(Process, script, address, option, str(tmp_path / "models")) for _ in range(3)]
    with Admin(address, timeout=60.0) as admin:

        def working() -> Any:
            for worker in workers:
                assert worker.alive, worker.output
            with suppress(GemError):
                status = admin.status()
                return len(status.workers) == 3 and all(worker.commits for worker in status.workers) and status
            return None

        before = wait_until(working, "three workers to have committed", PATIENCE)
        workers[1].kill()
        total = training_samples(script)
        assert before.shards.samples_completed < total, "the run was over before a worker was killed"
        assert [worker.wait() for worker in (workers[0], workers[2])] == [0, 0], [worker.output for worker in workers]
        after = admin.status()
    assert after.shards.samples_completed == total
    assert after.shards.samples_committed >= total
    assert after.training_loss < 4.0  # a uniform guess has log(128) = 4.85
    losses = [re.findall(r"^validation loss (\d\.\d+) after [1-9]\d* steps", worker.output, re.MULTILINE) for worker in workers]
    assert losses[1] == []
    assert losses[0] == losses[2] != [], "both hold the run's final θ"
    assert float(losses[0][0]) < 4.0
    for worker in (workers[0], workers[2]):
        saved = Path(re.findall(r"of this worker: (\S+)$", worker.output, re.MULTILINE)[0])
        assert saved.is_file() or (saved / "model.safetensors").is_file(), f"no model in {saved}"
    assert '"reason": "expired"' in server.log, server.log
