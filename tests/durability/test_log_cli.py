"""gem-ctl log, on the files of a real server, intact and damaged."""

from __future__ import annotations

import re
import shutil
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import gem_client
import numpy as np
import pytest
from click.testing import CliRunner, Result
from gem_ctl import cli as ctl
from gem_server.durability import log_cli, segment
from gem_server.durability.segment import name, serials
from kit.model import GRADIENT, model
from kit.server import config, serving
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
STEPS = 4


def log(*arguments: Any) -> Result:
    """Runs `gem-ctl log` in this process; whatever goes wrong must be told in a line, not raised."""
    result = CliRunner().invoke(log_cli.main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def log_of(folder: Path) -> Path:
    return folder / "log"


def damaged(folder: Path, record: int) -> Path:
    """Flips a bit in a record of the only segment; returns the segment."""
    (serial,) = serials(log_of(folder))
    path = log_of(folder) / name(serial)
    content = bytearray(path.read_bytes())
    records = [match.start() for match in re.finditer(b"GEMr", content)]
    content[records[record] + 50] ^= 1
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """The checkpoints of a run of four commits, the last of which is also a checkpoint; and θ of each version."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_ALLOCATION", 1 << 16)
        with (
            serving(config(checkpoint_dir=folder, durability="log")) as live,
            gem_client.connect(live.address) as session,
        ):
            thetas = [session.join(model()).tobytes()]
            thetas.extend(session.commit(GRADIENT).theta.tobytes() for _ in range(STEPS))
    return folder, thetas


@pytest.fixture
def folder(run: tuple[Path, list[bytes]], tmp_path: Path) -> Path:
    """A copy of the run's checkpoints."""
    return Path(shutil.copytree(run[0], tmp_path / "checkpoints"))


# -- verify


def test_verify_says_what_is_in_a_whole_log(folder: Path) -> None:
    result = log("verify", folder)
    assert result.exit_code == 0, result.output
    first, last, contents, outcome = result.output.splitlines()
    assert first.startswith(f"checkpoint-{STEPS:012d}-0001  log from segment-")
    assert last == "checkpoint-000000000000-0001  log from segment-00000001, record 1"
    assert contents.startswith("segment-00000001  records 1 to ")
    assert contents.endswith(f"{STEPS} commits, versions 1 to {STEPS}")
    assert outcome == "whole"


def test_verify_while_the_server_goes_on(tmp_path: Path) -> None:
    with (
        serving(config(checkpoint_dir=tmp_path, durability="log")) as live,
        gem_client.connect(live.address) as session,
    ):
        session.join(model())
        session.commit(GRADIENT)
        result = log("verify", tmp_path)
    assert result.exit_code == 0, result.output
    assert "1 commits, versions 1 to 1" in result.output


def test_verify_finds_a_damaged_record_that_had_reached_the_disk(folder: Path) -> None:
    path = damaged(folder, 1)
    result = log("verify", folder)
    assert result.exit_code == 1
    assert f"{path.name}  DAMAGED: " in result.output
    assert "has a hole" in result.output
    assert "whole" not in result.output.splitlines()


def test_verify_takes_a_torn_tail_for_what_it_is(folder: Path) -> None:
    damaged(folder, -1)
    result = log("verify", folder)
    assert result.exit_code == 0, result.output
    assert "ends in an unacknowledged partial record" in result.output


def test_verify_finds_a_missing_segment(folder: Path) -> None:
    for _ in range(2):
        with (
            serving(config(checkpoint_dir=folder, durability="log", resume=True, checkpoint_keep=100)) as live,
            gem_client.connect(live.address) as session,
        ):
            session.join(model())
            session.commit(GRADIENT)
    _, middle, last = serials(log_of(folder))
    (log_of(folder) / name(middle)).unlink()
    result = log("verify", folder)
    assert result.exit_code == 1
    assert f"{name(last)}  DAMAGED: " in result.output


def test_verify_bears_that_the_server_removes_a_segment_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_cli, "serials", lambda directory: [1, 2])
    result = log("verify", folder)
    assert result.exit_code == 0, result.output
    assert f"{name(2)}  removed while it was read" in result.output


def test_verify_of_a_folder_without_a_log_says_which_one_to_name(tmp_path: Path) -> None:
    result = log("verify", tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} has no log: only a run with --durability log has one" in result.output


# -- replay


def test_replay_rebuilds_any_version_and_changes_nothing(folder: Path, run: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    for version in (*range(STEPS + 1), None):
        out = tmp_path / f"{version}.safetensors"
        result = log("replay", folder, *([] if version is None else ["--to", version]), "--out", out)
        assert result.exit_code == 0, result.output
        reached = STEPS if version is None else version
        assert result.output.startswith(f"version {reached} of run ")
        tensors = load_file(out)
        assert {name: values.shape for name, values in tensors.items()} == {"w": (2, 3), "b": (3,)}
        assert np.concatenate([tensors["w"].ravel(), tensors["b"]]).tobytes() == run[1][reached]
    assert contents() == before


def refusal(folder: Path, out: Path, *options: Any) -> str:
    """The one line that a refused replay prints."""
    result = log("replay", folder, *options, "--out", out)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    return line


def test_replay_refuses_a_version_that_was_not_reached(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert "the log ends at version 4: version 99 was not reached" in refusal(folder, out, "--to", 99)
    assert not out.exists()


def test_replay_refuses_a_version_before_the_oldest_checkpoint(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("checkpoint-000000000000-*/*"):
        path.unlink()
    next(folder.glob("checkpoint-000000000000-*")).rmdir()
    assert "checkpoint_keep sets how many are kept" in refusal(folder, tmp_path / "model.safetensors", "--to", 2)


def test_replay_refuses_a_log_with_a_hole(folder: Path, tmp_path: Path) -> None:
    damaged(folder, 1)
    assert "has a hole" in refusal(folder, tmp_path / "model.safetensors", "--to", 3)


def test_replay_replaces_no_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("precious")
    assert refusal(folder, out) == f"Error: {out} exists: name a new file"
    assert out.read_text() == "precious"


def test_replay_into_a_folder_that_is_not_there_says_so(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "nowhere" / "model.safetensors"
    assert refusal(folder, out).startswith(f"Error: can't write {out}: ")


# -- as a part of gem-ctl


def test_gem_ctl_takes_in_the_command(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["gem_ctl.commands"]
    entry = EntryPoint("log", declared["log"], "gem_ctl.commands")
    assert entry.load() is log_cli.main

    def offered(group: str, name: str = entry.name) -> Any:
        return [entry] if (group, name) == (entry.group, entry.name) else []

    monkeypatch.setattr(ctl, "entry_points", offered)
    result = CliRunner().invoke(ctl.main, ["log", "verify", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "whole"
