"""Evaluates θ in a background thread during training, and reports to the server."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import torch
from gem_api.process.progress import say
from gem_client import GemError, LayoutMismatch, Retry

from gem_worker.device import CPU
from gem_worker.evaluation import Score
from gem_worker.evaluation.evaluate import RemoteEvaluator
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks import Task


class Scorer:
    """Evaluates the newest θ at intervals. It uses at most a tenth of the time, because the workers need the processor.

    Args:
        address: The server's address.
        task: The model and the held-out data.
        folder: Stores the scores, including those of an interrupted run.
        pause: Minimum seconds between two evaluations.
        device: Where to compute.
        token: The access token, if the server asks for one.
    """

    def __init__(
        self,
        address: str,
        task: Task,
        folder: RunFolder,
        pause: float,
        device: torch.device = CPU,
        token: str | None = None,
    ) -> None:
        self._evaluator = RemoteEvaluator(address, task, Retry(give_up_after=5.0), device, token=token)
        self._folder = folder
        self._pause = pause
        self._due = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._saved = False
        self._next_at = 0.0
        self.scores = _earlier_scores(folder)
        self.failure: Exception | None = None  # raised by the task; evaluation ends, because a retry would fail too
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._thread.start()

    @property
    def last(self) -> Score | None:
        return self.scores[-1] if self.scores else None

    def offer(self, version: int) -> None:
        """Starts an evaluation if `version` is new and the pause since the last one is over."""
        if self.failure is None and version > (self.last.version if self.last else 0) and time.monotonic() >= self._next_at:
            self._due.set()

    def save_model(self) -> None:
        """Saves the newest model, as evaluations are of it; if the servers do not answer, the last one received, if there is
        one."""
        with self._lock:
            newest = self._evaluator
            with suppress(GemError):
                newest.read()
            if newest.theta.size:
                self._folder.save_model(newest.reader.layout, newest.theta, newest.version)

    def end(self) -> None:
        """Saves the run's final model, once. No evaluation but `final_score` comes after it: the servers may stop."""
        self._closed = True
        if not self._saved:
            self.save_model()
            self._saved = True

    def final_score(self) -> None:
        """Evaluates the final θ. Call it after `end`: whatever the task does wrong now, the model is saved."""
        self._evaluate(final=True)

    def close(self) -> None:
        self._closed = True
        self._due.set()
        self._thread.join(timeout=30)
        self._evaluator.close()

    def _run(self) -> None:
        while self._due.wait() and not self._closed:
            self._due.clear()
            began = time.monotonic()
            self._evaluate()
            ended = time.monotonic()
            self._next_at = ended + max(self._pause, 10 * (ended - began))

    def _evaluate(self, final: bool = False) -> Score | None:
        with self._lock:
            if self._closed and not final:
                return None
            try:
                score = self._evaluator.evaluate()
            except LayoutMismatch as error:
                self.failure = error
                return None
            except GemError:
                return None  # the server is restarting: a later evaluation will succeed
            except Exception as error:
                self.failure = error
                return None
            self.scores.append(score)
            with suppress(OSError):  # a full disk: the next evaluation stores this one too
                self._folder.save_evaluations(self.scores)
            return score


def _earlier_scores(folder: RunFolder) -> list[Score]:
    """The evaluations of a run to resume; without them it goes on, too."""
    try:
        return folder.load_evaluations()
    except (OSError, ValueError) as error:
        say(f"  the earlier evaluations in {folder.path} are left out: {error}")
        return []
