"""What an earlier release wrote is read for ever. `make_old_files.py` wrote `old_files` with each release."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from durability.make_old_files import expected
from gem_api.hyperparameters import Hyperparameters
from gem_ctl.cli import main
from gem_server.durability.checkpoint import list_checkpoints
from safetensors.numpy import load_file

OLD = Path(__file__).parent / "old_files"
RUNS = sorted(path.parent for path in OLD.glob("*/*/expected.json"))


def ctl(*arguments: str | Path) -> list[str]:
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_an_old_run_goes_on_to_the_bit_from_each_of_its_checkpoints(run: Path, tmp_path: Path) -> None:
    facts = json.loads((run / "expected.json").read_text())
    settings = Hyperparameters(**facts.pop("hyperparameters"))
    folder = Path(shutil.copytree(run / "run", tmp_path / "run"))
    for checkpoint in list_checkpoints(folder):
        assert expected(folder, settings) == facts, f"from {checkpoint.name}"
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize("run", RUNS[:1], ids=lambda run: f"{run.parent.name}-{run.name}")
def test_an_old_log_is_verified_and_replayed(run: Path, tmp_path: Path) -> None:
    facts = json.loads((run / "expected.json").read_text())
    assert ctl("log", "verify", run / "run")[-1] == "whole"
    ctl("log", "replay", run / "run", "--out", tmp_path / "theta")
    theta = load_file(tmp_path / "theta")
    assert np.concatenate([theta["w"].ravel(), theta["b"]]).tobytes().hex() == facts["theta"]


@pytest.mark.parametrize("backups", sorted(OLD.glob("*/*/backups")), ids=lambda path: path.parent.name)
def test_an_old_backup_is_restored_and_cut_anew(backups: Path, tmp_path: Path) -> None:
    assert ctl("restore", backups, tmp_path / "restored")[0].startswith("restored run ")
    ctl("reshard", tmp_path / "restored", tmp_path / "whole", "--ranges", "1")
