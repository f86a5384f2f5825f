"""Section c: four workers on one GPU learn the digits, and one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gem_client import Admin, connect
from gem_worker.evaluation.evaluate import Evaluator
from gem_worker.tasks import load_task

from benchmarks.gpu.checks import Checks, Found
from benchmarks.lib.processes import server

_WORKERS, _KILLED = 4, 1
_EXITS = [0, -signal.SIGKILL, 0, 0]
_KILL_AT = 40  # commits
_EPOCHS, _ACCURACY = 40, 0.93
_EPOCHS_QUICK, _ACCURACY_QUICK = 24, 0.8
_POLL_SECONDS = 0.05


def run(checks: Checks) -> None:
    checks.check("c.digits, four workers, one killed", _digits, checks)


def _digits(checks: Checks) -> Found:
    epochs, least = (_EPOCHS_QUICK, _ACCURACY_QUICK) if checks.quick else (_EPOCHS, _ACCURACY)
    options = (f"--epochs={epochs}", "--learning-rate=0.01", f"--min-workers={_WORKERS}")
    with (
        server("gem", None, *options, lease_seconds=6) as (address, _),
        Admin(address) as admin,
        connect(address) as reader,
        _workers(address, checks.device) as workers,
    ):
        while admin.status().version < _KILL_AT and workers[_KILLED].poll() is None and checks.left() > 0:
            time.sleep(_POLL_SECONDS)
        workers[_KILLED].kill()
        exits = [worker.wait(max(1.0, checks.left())) for worker in workers]
        theta = reader.pull()
        here, on_cpu = (
            Evaluator(load_task("digits", None), torch.device(device)).score(reader.version, reader.layout, theta).accuracy
            or 0.0
            for device in (checks.device, "cpu")
        )
    return {
        "ok": here >= least and abs(here - on_cpu) < 0.01 and exits == _EXITS, "accuracy": here, "accuracy_on_cpu": on_cpu,
        "at_least": least, "commits": reader.version, "exit": exits,
    }  # fmt: skip


@contextmanager
def _workers(address: str, device: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The workers' processes; they end with the block."""
    command = [sys.executable, "-m", "gem_worker", "--task=digits", f"--server={address}", f"--device={device}"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, f"--name=w{number}"], env=alone) for number in range(_WORKERS)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
