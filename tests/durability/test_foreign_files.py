"""What another release wrote is not damaged: it keeps its name and its place, and one line says what wrote it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from crc32c import crc32c
from durability.test_damaged_checkpoints import edit, two
from durability.test_old_files import RUNS
from gem_api import __version__
from gem_api.hyperparameters import Hyperparameters
from gem_ctl.cli import main
from gem_server.config import StartError
from gem_server.durability import recovery
from gem_server.durability.checkpoint import ForeignCheckpoint, newest
from gem_server.durability.resume import make_core
from gem_server.durability.segment import Segment, SegmentWriter, name
from gem_server.durability.storage import Storage
from kit.core import make_core as make_empty_core
from kit.core import write_file
from kit.server import config
from safetensors.numpy import load_file
from structlog import get_logger

pytestmark = pytest.mark.usefixtures("quick_disk")
State = dict[str, Any]


def by(change: Callable[[State], object]) -> Callable[[Path], object]:
    """A state of another release, with the right SHA-256."""
    return edit(lambda state: (state.update(server_version="9.8.7"), change(state)))


def of_format_3(path: Path) -> None:
    by(lambda state: state.update(format="gem-checkpoint/3", sums={}))(path)


def with_a_digest_of_its_own(path: Path) -> None:
    of_format_3(path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "sha256": "blake3:0"}))


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a higher format": (of_format_3, "is of format 3, and this release"),
    "a higher format with another kind of digest": (with_a_digest_of_its_own, "is of format 3, and this release"),
    "an unknown setting": (by(lambda state: state["hyperparameters"].update(new=1)), "unknown name, 'new'"),
    "an unknown part": (by(lambda state: state.update(new=1)), "unknown name, 'new'"),
    "an unknown fact of a lease": (by(lambda state: state["leases"][0].update(new=1)), "unknown name, 'new'"),
    "an unknown file": (by(lambda state: state["files"].update(new=1)), "unknown name, 'new'"),
    "another word for its format": (by(lambda state: state.update(format="v3")), "state.format is 'v3'"),
    "no format": (by(lambda state: state.pop("format")), "state.format is 'None'"),
    "no files": (by(lambda state: state.pop("files")), "no 'files'"),
    "a setting that is missing": (by(lambda state: state["hyperparameters"].pop("kappa")), "no 'kappa'"),
    "a setting beyond its range": (by(lambda state: state["hyperparameters"].update(momentum=2)), "momentum"),
    "an unknown outcome": (by(lambda state: state["outcomes"].update(teleported=3)), "unknown name, 'teleported'"),
    "an unknown end of a lease": (by(lambda state: state["ended"].update(beamed=1)), "unknown name, 'beamed'"),
    "a group that can't be": (by(lambda state: state["groups"].update(weight=[-1.0, True])), "-1.0"),
    "an escape sequence in the release": (by(lambda state: state.update(server_version="\x1b[m9.8.7", new=1)), "x1b[m9.8.7"),
}  # fmt: skip


@pytest.mark.parametrize("why", FOREIGN)
def test_a_checkpoint_of_another_release_keeps_its_name_and_place(why: str, tmp_path: Path) -> None:
    change, said = FOREIGN[why]
    older, newer, _ = two(tmp_path)
    change(newer)
    for _ in range(2):
        with pytest.raises(ForeignCheckpoint) as caught:
            newest(tmp_path, lambda path, why: pytest.fail(f"{path} was refused: {why}"))
        assert sorted(path.name for path in tmp_path.iterdir()) == [older.name, newer.name]
    line = str(caught.value)
    assert said in line
    assert "9.8.7, which wrote it" in line
    assert newer.name in line
    assert line.isprintable()


def another_tensor(file: str) -> Callable[[Path], object]:
    def add(path: Path) -> None:
        tensors = load_file(path / file)
        (path / file).unlink()
        written = write_file(path / file, {**tensors, "/new": np.zeros(1, np.float32)})
        by(lambda state: state["files"].update({file: written}))(path)

    return add


UNKNOWN_TO_THE_RULE: dict[str, Callable[[Path], object]] = {
    "a shared number": by(lambda state: state["shared"].update({"/new": 1.5})),
    "a tensor of the model": another_tensor("model.safetensors"),
    "a buffer": another_tensor("workers.safetensors"),
}


@pytest.mark.parametrize("what", UNKNOWN_TO_THE_RULE)
def test_what_is_unknown_to_the_rule_is_not_dropped(what: str, tmp_path: Path) -> None:
    _, newer, _ = two(tmp_path)
    UNKNOWN_TO_THE_RULE[what](newer)
    before = names(tmp_path)
    with pytest.raises(ForeignCheckpoint, match=r"unknown .*'/new'.* release 9\.8\.7, which wrote it"):
        recovery.recover(
            tmp_path, lambda run_id, kept: make_empty_core(kept), 0.0, lambda path, why: pytest.fail(why), logged=False
        )
    assert names(tmp_path) == before


def test_no_foreign_checkpoint_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    older, newer, _ = two(tmp_path)
    of_format_3(older)
    (newer / "model.safetensors").write_bytes(b"")
    with pytest.raises(ForeignCheckpoint, match=older.name):
        newest(tmp_path, lambda path, why: None)
    assert older.is_dir()


def test_a_foreign_checkpoint_whose_files_are_damaged_stays_as_well(tmp_path: Path) -> None:
    _, newer, _ = two(tmp_path)
    of_format_3(newer)
    (newer / "model.safetensors").unlink()
    with pytest.raises(ForeignCheckpoint):
        newest(tmp_path, lambda path, why: None)


# -- the log, and the commands


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a log, of which a server of a higher format wrote the last segment."""
    folder = Path(shutil.copytree(RUNS[0] / "run", tmp_path / "run"))
    (folder / "log" / "segment-00000003").write_bytes(header_of_format_3(3, 20))
    return folder


def header_of_format_3(serial: int, first: int) -> bytes:
    head = b"GEMLOG3\n" + serial.to_bytes(8, "little") + first.to_bytes(8, "little") + bytes(4) + b"01234567"
    head += b"9.8.7".ljust(20, b"\0") + b"what format 3 adds"
    return head + crc32c(head, 99).to_bytes(4, "little")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def ctl(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_a_server_does_not_start_from_a_log_of_a_higher_format(run: Path) -> None:
    before = names(run)
    with pytest.raises(StartError, match=r"segment-00000003 is of format 3, .* use release 9\.8\.7, which wrote it"):
        make_core(config(Hyperparameters(), checkpoint_dir=run, resume=True, durability="log"), lambda: 0.0, get_logger())
    assert names(run) == before


def test_the_log_commands_say_that_a_segment_is_foreign(run: Path, tmp_path: Path) -> None:
    seen = ctl("log", "verify", run)
    assert seen.exit_code == 1
    assert "segment-00000003  NOT READ: " in seen.stdout
    assert "DAMAGED" not in seen.stdout
    replayed = ctl("log", "replay", run, "--out", tmp_path / "theta")
    assert replayed.exit_code == 1
    assert "release 9.8.7, which wrote it" in replayed.stderr
    assert replayed.stderr.count("\n") == 1


def test_the_commands_on_files_refuse_a_foreign_checkpoint_and_take_no_older_one(run: Path, tmp_path: Path) -> None:
    of_format_3(max(run.glob("checkpoint-*")))
    before = names(run)
    for command in (["log", "replay", run, "--out", tmp_path / "theta"], ["reshard", run, tmp_path / "new", "--ranges", "1"]):
        done = ctl(*map(str, command))
        assert done.exit_code == 1
        assert "is of format 3" in done.stderr.splitlines()[-1]
    assert names(run) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", [of_format_3, by(lambda state: state.update(new=1))], ids=["format", "name"])
def test_a_log_before_a_foreign_checkpoint_is_not_called_whole(change: Callable[[Path], object], run: Path) -> None:
    (run / "log" / "segment-00000003").unlink()
    foreign = max(run.glob("checkpoint-*"))
    assert ctl("log", "verify", run).stdout.endswith("whole\n")
    change(foreign)
    seen = ctl("log", "verify", run)
    assert seen.exit_code == 1
    assert "release 9.8.7, which wrote it" in next(line for line in seen.stdout.splitlines() if foreign.name in line)
    assert "whole" not in seen.stdout.splitlines()


def test_a_foreign_checkpoint_keeps_all_segments(run: Path) -> None:
    """It may need any: where its log begins is not known."""
    of_format_3(max(run.glob("checkpoint-*")))
    before = names(run)
    recovery.forget_segments(run)
    assert names(run) == before


def test_a_segment_says_what_wrote_it(tmp_path: Path) -> None:
    SegmentWriter(Storage(), tmp_path, 1, 1, 7, "01234567").close()
    assert Segment(tmp_path / name(1)).release == __version__
