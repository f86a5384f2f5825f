"""Follows a run into an experiment tracker until the run is over."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gem_api.errors import GemError
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.regular_file import MAX_BYTES, read_regular
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin

from gem_ctl.text import known
from gem_ctl.track.tracker import Tracker, TrackerError
from gem_ctl.watch import Interrupts, Watch

_MAX_PENDING = 10_000  # points that wait while the tracker is away; beyond that the oldest are dropped
_LAST_EVALUATION = 60.0  # seconds to wait for the evaluation of the final version
Point = tuple[int, dict[str, float]]


class Follower:
    """Copies what a server reports about its run into a tracker.

    Args:
        admin: The server.
        tracker: Receives settings, metrics and the model.
        folder: The run's folder, if gem-train on this machine leads the run: then it tells how the run ended.
        pull: Saves the model to a path. Raises GemError or OSError.
        say: Prints a line.
    """

    def __init__(
        self, admin: Admin, tracker: Tracker, folder: Path | None, pull: Callable[[Path], object], say: Callable[[str], object]
    ) -> None:
        self._tracker, self._folder, self._pull, self._say = tracker, folder, pull, say
        self._watch = Watch(admin, folder)
        self._last: dict[str, int] = {}
        self._pending: deque[Point] = deque(maxlen=_MAX_PENDING)
        self._run_id = ""
        self._completed_at: float | None = None
        self._trouble = ""

    def follow(self, every: float, interrupts: Interrupts) -> str | None:
        """Follows the run to its end; returns its outcome, or None if Ctrl-C ended the tracking before.

        Args:
            every: Seconds between two requests.
            interrupts: Receives Ctrl-C.

        Raises:
            GemError: The server does not respond at first, or not for a long time.
            TrackerError: The tracker can't be used at first, or does not take what it misses at the end.
        """
        outcome = None
        with tempfile.TemporaryDirectory(prefix="gem-track-") as scratch:
            model = Path(scratch) / "model.safetensors"
            try:
                while outcome is None:
                    outcome = self._step(interrupts, model)
                    if outcome is None:
                        interrupts.wait(lambda: time.sleep(every))
            except KeyboardInterrupt:
                pass
            if self._run_id:
                self._finish(outcome, model)
        return outcome

    def _step(self, interrupts: Interrupts, model: Path) -> str | None:
        """Requests the status once and logs what is new; returns the run's outcome once it is over."""
        lost, over = self._watch.trouble, self._watch.look(interrupts)
        status = self._watch.status
        if over is not None or status is None or self._watch.trouble:
            if self._watch.trouble and not lost:
                self._say(self._watch.trouble)
            return over
        if lost:
            self._say("the server responds again")
        if not self._run_id and not self._started(status):
            return None
        self._add(points(status))
        self._send()
        if status.state != pb.RUN_STATE_COMPLETE:
            self._completed_at = None
            return None
        if self._completed_at is None:
            self._completed_at = time.monotonic()
            with suppress(GemError, OSError):  # the server may end at any moment now
                self._pull(model)
        return "complete" if self._folder is None and self._is_evaluated(status) else None

    def _started(self, status: pb.GetStatusResponse) -> bool:
        """Opens the tracker's run once a worker has brought the model, as it may also bring the optimizer."""
        if not status.parameter_count:
            if not self._trouble:
                self._trouble = "waiting"
                self._say(f"run {status.run_id}: waiting for the first worker")
            return False
        self._trouble = ""
        self._last = self._tracker.start(status.run_id, settings(status))
        self._run_id = status.run_id
        again = f", going on after version {max(self._last.values())}" if self._last else ""
        self._say(f"tracking run {status.run_id}{again}: {self._tracker.where()}")
        return True

    def _is_evaluated(self, status: pb.GetStatusResponse) -> bool:
        """Whether no further evaluation is to be expected of a run that is complete."""
        if not status.HasField("evaluation") or status.evaluation.version >= status.version:
            return True
        return time.monotonic() - (self._completed_at or 0.0) > _LAST_EVALUATION

    def _add(self, points: list[Point]) -> None:
        """Keeps the values that the tracker does not have yet: a late start or a restarted server repeats none."""
        for version, values in points:
            new = {name: value for name, value in values.items() if version > self._last.get(name, -1)}
            if new:
                self._last.update(dict.fromkeys(new, version))
                self._pending.append((version, new))

    def _send(self) -> None:
        """Logs what is pending. If the tracker is away, keeps it for the next time."""
        try:
            self._log_pending()
        except TrackerError as error:
            if not self._trouble:
                self._say(f"{error}; trying again")
            self._trouble = str(error)
            return
        if self._trouble:
            self._say("the tracker takes metrics again")
            self._trouble = ""

    def _log_pending(self) -> None:
        while self._pending:
            self._tracker.log(*self._pending[0])
            self._pending.popleft()

    def _finish(self, outcome: str | None, model: Path) -> None:
        if outcome is not None and self._folder is not None:
            self._add(final_points(self._folder))
        self._log_pending()
        if outcome is not None:
            self._save_model(model)
        self._tracker.finish(outcome)

    def _save_model(self, model: Path) -> None:
        """Keeps the model that was pulled, or the one that gem-train or the last checkpoint left."""
        left = [] if self._folder is None else [self._folder / "model.safetensors"]
        left += [] if self._folder is None else sorted(self._folder.glob("checkpoints/checkpoint-*/model.safetensors"))[::-1]
        for path in (*left, model):
            if path.exists():
                self._say(f"model: {self._tracker.save_model(path)}")
                return
        self._say("no model: the server ended before it could be pulled")


def settings(status: pb.GetStatusResponse) -> dict[str, Any]:
    """The run's hyper-parameters and the size of its model; what is empty is left out."""
    hyperparameters = asdict(Hyperparameters.from_message(status.hyperparameters))
    known_ = {name: value for name, value in hyperparameters.items() if value != ""}
    return {**known_, "parameters": status.parameter_count, "gem_ps": status.server_version}


def points(status: pb.GetStatusResponse) -> list[Point]:
    """The metrics in a status, each with the version that it belongs to. Those without a finite value are left out."""
    evaluation = status.evaluation if status.HasField("evaluation") else None
    training = {
        "train/loss": known(status, "training_loss"),
        "train/learning_rate": known(status, "learning_rate"),
        "gem/pi_median": known(status, "pi_median"),
        "gem/staleness": status.staleness,
        "gem/commits_per_second": known(status, "commits_per_second"),
        "gem/workers": float(status.worker_count),
    }
    evaluated: dict[str, float | None] = _scores(evaluation.loss, known(evaluation, "accuracy")) if evaluation else {}
    both = ((status.version, training if status.version else {}), (evaluation.version if evaluation else 0, evaluated))
    return [(version, finite) for version, values in both if (finite := _finite(values))]


def final_points(folder: Path) -> list[Point]:
    """The last evaluation in a run's folder, which the launcher may have made after the server's last status."""
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        last = json.loads(read_regular(folder / "evaluations.json", MAX_BYTES))[-1]
        return [(int(last["version"]), _finite(_scores(last["loss"], last["accuracy"])))]
    return []


def _scores(loss: float | None, accuracy: float | None) -> dict[str, float | None]:
    return {"eval/loss": loss, "eval/accuracy": accuracy}


def _finite(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
