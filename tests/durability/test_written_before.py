"""A run whose checkpoints and log an earlier version of this project wrote can be resumed.

`written_by_0_1_0` holds the folder of a server that was killed at version 10 with `--durability log`: checkpoints of versions 0
and 6, and the two segments of the log, without the space allocated ahead. `expected.json` says what the server held then.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from fuzz.targets import sum_state
from gem_server.durability.log_cli import main as log_command
from kit.server import Live, config, serving

WRITTEN = Path(__file__).with_name("written_by_0_1_0")
EXPECTED = json.loads((WRITTEN / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "run")
    return tmp_path / "run"


def held(live: Live) -> tuple[str, int, list[int], dict[str, int], int]:
    """Run, version, the bits of θ, each live worker's last sequence, and the completed shards."""
    core = live.core
    workers = {lease.worker: lease.sequence for lease in core.leases.live.values()}
    return core.run_id, core.central.version, core.central.theta.view(np.uint32).tolist(), workers, core.ledger.completed


def test_its_checkpoint_and_log_give_the_run_back_to_the_bit(folder: Path) -> None:
    with serving(config(checkpoint_dir=folder, resume=True, durability="log")) as live:
        expected = (
            EXPECTED["run_id"],
            EXPECTED["version"],
            EXPECTED["theta_bits"],
            {"ann": 5, "bob": 5},
            EXPECTED["completed"],
        )
        assert live.on_loop(lambda: held(live)) == expected


def test_its_older_checkpoint_and_the_log_since_give_the_same(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint-000000000006-0001")
    with serving(config(checkpoint_dir=folder, resume=True)) as live:
        assert live.on_loop(lambda: held(live))[1:3] == (EXPECTED["version"], EXPECTED["theta_bits"])


ADDED_LATER = {
    "hyperparameters": ["rule_options", "local_steps", "local_momentum", "weight_decay", "schedule", "warmup_versions",
                        "decay_versions", "decay_factor"],
    "lease": ["owner", "spare_version"],
    "answer": ["scale", "discarded"],
    "state": ["norms", "shared", "log"],
}  # fmt: skip


def test_a_checkpoint_without_the_names_that_were_added_later_goes_on(folder: Path) -> None:
    path = folder / "checkpoint-000000000006-0001" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    version, leases = state["version"], len(state["leases"])
    parts = [("state", state), ("hyperparameters", state["hyperparameters"])]
    parts += [("lease", lease) for lease in state["leases"]]
    parts += [("answer", lease["answer"]) for lease in state["leases"]]
    for kind, part in parts:
        for name in ADDED_LATER[kind]:
            del part[name]
    path.write_bytes(sum_state(state))
    with serving(config(checkpoint_dir=folder, resume=True)) as live:
        assert live.on_loop(lambda: (live.core.central.version, len(live.core.leases.live))) == (version, leases)


def test_the_tools_read_its_log(folder: Path) -> None:
    verified = CliRunner().invoke(log_command, ["verify", str(folder)])
    assert (verified.exit_code, verified.output.splitlines()[-1]) == (0, "whole")
    model = folder / "version-8.safetensors"
    replayed = CliRunner().invoke(log_command, ["replay", str(folder), "--to", "8", "--out", str(model)])
    assert replayed.exit_code == 0, replayed.output
    assert model.is_file()
