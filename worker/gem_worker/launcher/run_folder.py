"""The folder of one run: its options, the data needed to resume it, and its results."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gem_api import __version__
from gem_api.history import read_history
from gem_api.layout import Layout, Vector
from gem_api.ranges import Range
from gem_ctl.curves import COLUMNS
from gem_ctl.local_runs import ADMIN_TOKEN
from safetensors.numpy import save_file

from gem_worker.evaluation import Score

_RANGE = "range-"  # in the names of the checkpoints' folders of several servers
PACKAGES = ("torch", "numpy", "numba", "grpcio", "protobuf", "safetensors")


class RunFolder:
    """The paths in runs/<id>/.

    During the run: run.json, commits.csv, checkpoints/, logs/, server.address. With several servers, checkpoints/range-0 …,
    logs/server-0.log …; commits.csv and server.address are the lead's. At the end also summary.json, report.png,
    report.html and model.safetensors. If workers run on other machines: tokens, worker-token and admin-token, which only this
    run's server accepts.
    """

    def __init__(self, path: Path, given: bool = False) -> None:
        self.path, self._given = path, given
        self.commits = path / "commits.csv"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.options = path / "run.json"
        self.evaluations = path / "evaluations.json"
        self.plot = path / "report.png"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.tokens = path / "tokens"  # only if workers run on other machines
        self.worker_token = path / "worker-token"
        self.admin_token = path / ADMIN_TOKEN

    def checkpoints_of(self, held: Range) -> Path:
        """Where a server keeps its checkpoints: `checkpoints`, or checkpoints/range-I if there are several servers."""
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
        taken = 0
        while (path := parent / (f"{name}-{taken + 1}" if taken else name)).exists():
            taken += 1
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
        _replace(self.options, json.dumps({**stored, "resume": None}, indent=2, default=str) + "\n")

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
        save_file(layout.split(theta), self.model, metadata={"format": "pt", "gem_version": str(version)})

    def save_evaluations(self, scores: list[Score]) -> None:
        _replace(self.evaluations, json.dumps([vars(score) for score in scores if math.isfinite(score.loss)]) + "\n")

    def load_evaluations(self) -> list[Score]:
        return [Score(**score) for score in json.loads(self.evaluations.read_text())] if self.evaluations.exists() else []

    def save_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json; NaN and infinity become null, because JSON has neither."""
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in summary.items()
        }
        _replace(self.summary, json.dumps(known, indent=2, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    """Writes a file of which a process that is killed leaves the old text or the new one."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text)
    scratch.replace(path)


def _write_privately(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def samples_applied(history: dict[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """The samples of each commit in `history`, float64; 0 for a commit that the rule discarded."""
    return np.where(history["discarded"] == 0, history["samples"], 0.0)


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of the libraries that results may depend on."""
    return {"gem-ps": __version__, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
