"""A script that starts processes of its own: those import it, and must not join the run as more workers."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
from pathlib import Path

import pytest
from gem_client import InvalidRequest, connect
from kit.model import ended
from kit.process import python
from kit.server import Live

JOIN = """
with gem_client.connect({address!r}) as session:
    optimizer = Optimizer(nn.Linear(1, 1).named_parameters(), session)
    sampler = ShardSampler(session, [torch.ones(1)] * 64, 64)
    print("batch", len(next(iter(sampler.loader(num_workers=1)))))
"""
SCRIPT = """
import gem_client, torch
from gem_client.torch import Optimizer, ShardSampler
from torch import nn
"""
CHILD = """
import multiprocessing
import gem_client

def join(address):
    with gem_client.connect(address) as session:
        session.join({{"w": [1.0]}})

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=join, args=({address!r},))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
ADVICE = 'put the script\'s code under `if __name__ == "__main__":`'


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return python(script)


def test_a_process_that_still_imports_its_parents_script_may_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(InvalidRequest, match=re.escape(ADVICE)):
        connect("127.0.0.1:1")


@pytest.mark.long
@pytest.mark.parametrize("guarded", [False, True])
def test_a_loaders_spawned_process_does_not_join_the_run(guarded: bool, live: Live, tmp_path: Path) -> None:
    """Without the guard around the script's code it is told to put one there."""
    body = JOIN.format(address=live.address)
    if guarded:
        body = 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in body.strip().splitlines())
    ran = run(tmp_path, SCRIPT + body)
    assert (ran.returncode == 0, ran.stdout) == (guarded, "batch 64\n" if guarded else ""), ran.stderr
    assert (ADVICE in ran.stderr) == (not guarded), ran.stderr
    assert sum(ended(live).values()) == 1, "one worker was in the run"


@pytest.mark.long
def test_a_spawned_process_that_has_started_may_join(live: Live, tmp_path: Path) -> None:
    ran = run(tmp_path, CHILD.format(address=live.address))
    assert ran.returncode == 0, ran.stderr
    assert ended(live) == {"left": 1}
