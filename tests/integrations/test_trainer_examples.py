"""The examples with Lightning and Hugging Face's Trainer, as processes: a gem-server and three workers, one of them killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from gem_client import Admin, GemError
from kit.pages import ROOT
from kit.server import wait_until
from kit.settings import configured
from torch.utils.data import random_split

PATIENCE = 400.0  # seconds that a process may take to get anywhere on a busy machine
SETTINGS = ("--epochs", "1", "--batch-size", "32", "--min-workers", "3")


@dataclass
class Process:
    """A running command, and the file with its output."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts Python with some arguments, and leaves no process behind."""
    with ExitStack() as stack:

        def begin(*arguments: str) -> Process:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
            path = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}.txt"
            with path.open("wb") as file:
                process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.kill)
            return Process(process, path)

        yield begin


def address_of(server: Process) -> str:
    def said() -> str | None:
        assert server.process.poll() is None, server.output
        lines = [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]
        return next((line["address"] for line in lines if line.get("event") == "serving"), None)

    return str(wait_until(said, "the server to serve", PATIENCE))


def training_samples(script: str) -> int:
    """Size of the example's training set."""
    return len(random_split(run_path(script, run_name="example")["Text"](), [0.9, 0.1])[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("example", "option"), [("lightning", "--checkpoints"), ("transformers", "--output")])
def test_three_workers_complete_the_run_though_one_is_killed(start: Any, tmp_path: Path, example: str, option: str) -> None:
    flags = (
        "--listen",
        "127.0.0.1:0",
        "--metrics-listen",
        "",
        *SETTINGS,
        configured(log_format="json", shard_size=64, lease_seconds=5),
    )
    server = start("-m", "gem_server", *flags)
    address = address_of(server)
    script = str(ROOT / "examples" / example / "train.py")
    workers = [start(script, address, option, str(tmp_path / "models")) for _ in range(3)]
    with Admin(address, timeout=60.0) as admin:

        def working() -> Any:
            for worker in workers:
                assert worker.process.poll() is None, worker.output
            with suppress(GemError):
                status = admin.status()
                return len(status.workers) == 3 and all(worker.commits for worker in status.workers) and status
            return None

        before = wait_until(working, "three workers to have committed", PATIENCE)
        workers[1].process.kill()
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
    assert '"reason": "expired"' in server.output, server.output
