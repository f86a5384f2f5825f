"""The folder of one run: its options, the data needed to resume it, and its results."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gem_api import __version__
from gem_api.history import read_history
from gem_api.layout import Layout, Vector
from gem_api.ranges import Range
from gem_ctl.local_runs import ADMIN_TOKEN
from gem_ctl.output import replace
from gem_ctl.recorded_commits import COLUMNS
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gem_worker.evaluation import Score

_RANGE = "range-"  # in the names of the checkpoints' folders of several servers
PACKAGES = ("torch", "numpy", "numba", "grpcio", "protobuf", "safetensors")


class RunFolder:
    """The paths in runs/<id>/.

    During the run: run.json, commits.csv, checkpoints/, logs/, server.address. With several servers, checkpoints/range-0 …,
    logs/server-0.log …; commits.csv and server.address are the leader's. At the end also summary.json, report.html
    and model.safetensors. If workers run on other machines: tokens, worker-token and admin-token, which only this
    run's server accepts.

    Attributes:
        results: The results that were saved, by their name, and where; None if there was no room for it anywhere.
    """

    def __init__(self, path: Path, given: bool = False) -> None:
        self.path, self._given = path, given
        self.commits = path / "commits.csv"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.options = path / "run.json"
        self.evaluations = path / "evaluations.json"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.tokens = path / "tokens"  # only if workers run on other machines
        self.worker_token = path / "worker-token"
        self.admin_token = path / ADMIN_TOKEN
        self.results: dict[str, Path | None] = {}
        self._no_room: OSError | None = None
        self._elsewhere: Path | None = None

    def checkpoints_of(self, held: Range) -> Path:
        """The folder in which a server keeps its checkpoints: `checkpoints`, or checkpoints/range-I of several servers."""
        return self.checkpoints if held.whole else self.checkpoints / f"{_RANGE}{held.index}"

    def count_ranges(self) -> int:
        """The number of servers that the checkpoints are for; 0 if there are no checkpoints yet."""
        if ranges := len(list(self.checkpoints.glob(f"{_RANGE}*"))):
            return ranges
        return int(self.checkpoints.exists())

    @property
    def empty(self) -> bool:
        """Whether it holds nothing, but for what a file system or an interrupted write leaves there."""
        return all(entry.name == "lost+found" or entry.name.startswith(".") for entry in self.path.iterdir())

    @classmethod
    def create(cls, parent: Path, label: str, options: dict[str, Any]) -> RunFolder:
        """Creates a folder named after the time and the label. Raises OSError."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', label)}"
        parent.mkdir(parents=True, exist_ok=True)
        for taken in itertools.count():
            path = parent / (f"{name}-{taken}" if taken else name)
            with suppress(FileExistsError):
                path.mkdir()  # not a question whether it exists: another gem-train may begin in the same second
                break
        return cls.begin(path, options)

    @classmethod
    def begin(cls, path: Path, options: dict[str, Any], given: bool = False) -> RunFolder:
        """Makes a folder that of a new run; `given` if the user made it. Raises OSError."""
        folder = cls(path, given)
        path.mkdir(parents=True, exist_ok=True)
        folder.save_options(options)  # first: from then on the run can be resumed
        folder.logs.mkdir()
        return folder

    def discard(self) -> None:
        """Removes the folder; if the user made it, what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._given:
            self.path.mkdir(exist_ok=True)

    def save_options(self, options: dict[str, Any]) -> None:
        """Stores the run's options for a later --resume."""
        stored = {name: value for name, value in options.items() if name != "folder"}
        _write(self.options, json.dumps({**stored, "resume": None}, indent=2, default=str) + "\n")

    def write_tokens(self) -> str:
        """Writes the run's tokens, readable by their owner alone: the server's file, and each client's token. Returns the
        workers' token.

        A resumed run keeps its tokens, because the leases in its checkpoint belong to them.
        """
        if self.tokens.exists():
            return self.worker_token.read_text().strip()
        clients = {"worker": self.worker_token, "admin": self.admin_token}
        tokens = {role: secrets.token_hex(32) for role in clients}
        for role, path in clients.items():
            _write_privately(path, f"{tokens[role]}\n")
        _write_privately(self.tokens, "".join(f"{token} {role}\n" for role, token in tokens.items()))
        return tokens["worker"]

    def history(self) -> dict[str, npt.NDArray[np.float64]]:
        """The columns of commits.csv as float64, without the workers' names; NaN for an empty field.

        Raises OSError or HistoryError.
        """
        pieces = [piece.columns for piece in read_history(self.commits)]
        names = pieces[0] if pieces else COLUMNS
        return {name: np.concatenate([piece[name] for piece in pieces] or [np.zeros(0)]) for name in names}

    def save_model(self, layout: Layout, theta: Vector, version: int) -> None:
        """Writes model.safetensors, as `results` says."""
        metadata = {"format": "pt", "gem_version": str(version)}

        def write(scratch: Path) -> None:
            try:
                save_file(layout.split(theta), scratch, metadata)
            except SafetensorError as error:
                raise OSError(str(error)) from error

        self._save(self.model.name, write)

    def save_evaluations(self, scores: list[Score]) -> None:
        """Stores the evaluations for a later --resume and the report. Raises OSError."""
        _write(self.evaluations, json.dumps([vars(score) for score in scores if math.isfinite(score.loss)]) + "\n")

    def load_evaluations(self) -> list[Score]:
        """The evaluations of a run to resume. Raises OSError, or ValueError if the file is damaged."""
        if not self.evaluations.exists():
            return []
        try:
            stored = json.loads(self.evaluations.read_text())
            known = [(int(each["version"]), float(each["loss"]), each["accuracy"]) for each in stored]
            return [Score(version, loss, accuracy and float(accuracy)) for version, loss, accuracy in known]
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{self.evaluations.name} holds no evaluations") from error

    def save_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json, as `results` says; NaN and infinity become null, because JSON has neither."""
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in summary.items()
        }
        self._save(self.summary.name, lambda scratch: scratch.write_text(json.dumps(known, indent=2, allow_nan=False) + "\n"))

    @property
    def misplaced(self) -> str | None:
        """The results that are not in the folder, and why; None if all are."""
        if self._no_room is None:
            return None
        why = f"can't write to {self.path}: {self._no_room.strerror or self._no_room}"
        moved = [name for name, where in self.results.items() if where not in (None, self.path / name)]
        lost = [name for name, where in self.results.items() if where is None]
        said = [f"{' and '.join(moved)} {'is' if len(moved) == 1 else 'are'} in {self._elsewhere}"] if moved else []
        said += [f"there is no room elsewhere for {' and '.join(lost)}"] if lost else []
        return f"{why}; {', and '.join(said)}"

    def _save(self, name: str, write: Callable[[Path], object]) -> None:
        """Has `write` make a result in the run's folder; if that can't be written, in a new temporary folder."""
        try:
            replace(self.path / name, write)
            self.results[name] = self.path / name
            return
        except OSError as error:
            self._no_room = error
        self.results[name] = None
        with suppress(OSError):
            if self._elsewhere is None:
                self._elsewhere = Path(tempfile.mkdtemp(prefix=f"gem-{self.path.name}-"))
            replace(self._elsewhere / name, write)
            self.results[name] = self._elsewhere / name


def _write(path: Path, text: str) -> None:
    """Writes a file of which a process that is killed leaves the old text or the new one."""
    replace(path, lambda scratch: scratch.write_text(text))


def _write_privately(path: Path, text: str) -> None:
    def write(scratch: Path) -> None:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    replace(path, write)


def samples_applied(history: dict[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """The samples of each commit in `history`, float64; 0 for a commit that the rule discarded."""
    return np.where(history["discarded"] == 0, history["samples"], 0.0)


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of the libraries that results may depend on."""
    return {"gem-ps": __version__, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
