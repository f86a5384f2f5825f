"""The README's worker, run exactly as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gem_api.hyperparameters import Hyperparameters
from gem_client import Admin
from live import config, serving

README = Path(__file__).parents[2] / "README.md"


def worker_text() -> str:
    """The README's first block of Python."""
    return str(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0])


def test_the_readmes_worker_is_short_and_trains(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(worker_text())
    assert len(worker_text().splitlines()) < 25
    with serving(config(Hyperparameters(epochs=20, shard_size=256))) as live:
        command = [sys.executable, str(script), live.address]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        printed = [worker.communicate(timeout=120)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
        assert all(line.startswith("done at version") for line in printed)
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == 20 * 2048
        assert live.on_loop(lambda: live.server.core.ledger.all_complete)
        with Admin(live.address) as admin:
            assert admin.status().training_loss < 0.1
