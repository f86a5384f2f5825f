"""Writes the files that later releases must read for ever: `python -m durability.make_old_files FOLDER` in tests/.

Run it once, with the release whose formats they are; tests/durability/old_files holds what the earlier ones wrote. It crashes
servers in the middle of a run, and notes what θ was, and what it is after three more commits of each worker.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_ctl.cli import main
from gem_server.config import ServerConfig
from gem_server.durability.resume import make_core
from kit.core import commit
from kit.raw_ranges import commit_all, serving_ranges
from kit.server import config, serving
from structlog import get_logger

_FALLING: dict[str, Any] = {"schedule": "cosine", "decay_versions": 20, "warmup_versions": 4}
CASES = {
    "gem": Hyperparameters(**_FALLING),
    "gem-nesterov-int8": Hyperparameters(rule_options="proxy=nesterov", **_FALLING),
    "gem-global": Hyperparameters(rule_options="proxy=global", **_FALLING),
    "gem-adamw": Hyperparameters(optimizer="adamw", weight_decay=0.01).with_defaults(["weight_decay"]),
    "dana": Hyperparameters(rule="dana"),
    "diloco": Hyperparameters(rule="diloco"),
    "downpour-backup": Hyperparameters(rule="downpour"),
    "gem-slower": Hyperparameters(**_FALLING),
}
SLOWER = 0.01  # the learning rate of a second start
MODEL = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def folder(case: str, into: Path) -> None:
    """Trains with two workers, and keeps what a kill -9 would leave."""
    begun = config(CASES[case], checkpoint_dir=into / "run", durability="log")
    train(case, begun, into)
    if case.endswith("slower"):
        slower = replace(begun.hyperparameters, learning_rate=SLOWER)
        train(case, replace(begun, hyperparameters=slower, given=frozenset({"learning_rate"}), resume=True), into)
    small(into / "run")


def train(case: str, begun: ServerConfig, into: Path) -> None:
    random = np.random.default_rng(len(case))
    dtype = "int8" if case.endswith("int8") else "float32"
    with serving(begun) as live, ExitStack() as opened:
        sessions = [opened.enter_context(connect(live.address, name=name, gradient_dtype=dtype)) for name in ("ann", "bob")]
        for session in sessions:
            session.join(MODEL)
        for step in range(12):
            update = random.normal(size=9).astype(np.float32)
            session = sessions[step % 3 == 0]
            session.commit(update, loss=float(step), samples=4, kind=session.update_kind)
            if step == 6:
                ctl("--server", live.address, "checkpoint", *(["--to", str(into / "backups")] if "backup" in case else []))
        shutil.copytree(into / "run", into / "crashed")
    shutil.rmtree(into / "run")
    (into / "crashed").rename(into / "run")


def ranges(into: Path) -> None:
    """A backup of two servers that hold the model together; each element is minus the number of commits."""
    with serving_ranges(into / "run") as servers:
        workers = servers.started("ann")
        for _ in range(3):
            commit_all(workers)
        ctl("--server", servers.lives[0].address, "checkpoint", "--to", into / "backups")
    shutil.rmtree(into / "run")


def resumed(where: Path, settings: Hyperparameters) -> Any:
    """What a server that starts in this folder resumes."""
    how = config(settings, checkpoint_dir=where, resume=True, durability="log")
    return make_core(how, lambda: 0.0, get_logger())


def expected(where: Path, settings: Hyperparameters) -> dict[str, Any]:
    """θ as resumed, and after three more commits of each worker, as hexadecimal digits."""
    core = resumed(where, settings).core
    facts = {"version": core.central.version, "theta": core.central.theta.tobytes().hex()}
    random = np.random.default_rng(5)
    for _ in range(3):
        for lease in list(core.leases.live.values()):
            commit(core, lease.lease_id, lease.sequence + 1, random.normal(size=9).astype(np.float32))
    return {**facts, "theta_later": core.central.theta.tobytes().hex()}


def small(where: Path) -> None:
    """Cuts the space off that the log's segments have reserved, and what belongs to no run."""
    for segment in (where / "log").glob("segment-*"):
        segment.write_bytes(segment.read_bytes().rstrip(b"\0") + bytes(16))
    for other in (where / ".lock", where / "commits.csv", *(where / "log").glob("spare-*")):
        other.unlink(missing_ok=True)


def ctl(*arguments: str | Path) -> None:
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output


if __name__ == "__main__":
    target = Path(sys.argv[1])
    ranges(target / "ranges-backup")
    for name, case in CASES.items():
        folder(name, target / name)
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(shutil.copytree(target / name / "run", Path(scratch) / "run"))
            facts = expected(copy, case)
        (target / name / "expected.json").write_text(json.dumps({**facts, "hyperparameters": asdict(case)}, indent=1))
