"""Runs as trials of Ray Tune: each has a server and workers of its own.

from gem_worker.ray.tune import trainable
from ray import tune

trial = trainable("my_task:Sine", workers=4, epochs=40)
tuner = tune.Tuner(trial, param_space={"learning_rate": tune.loguniform(1e-3, 1e-1)})
print(tuner.fit().get_best_result("test_loss", "min").metrics["folder"])
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gem_api.process.extras import install

import gem_worker.ray

try:
    from ray import tune
except ImportError as missing:
    raise ModuleNotFoundError(f"gem_worker.ray.tune needs Ray Tune: {install('tune')}") from missing

__all__ = ["trainable"]


class _Stopped(BaseException):
    """Tune has stopped the trial. Not an Exception: it is no error."""


def trainable(
    task: str | None = None,
    *,
    workers: int = 4,
    resources_per_worker: Mapping[str, float] | None = None,
    runs: Path | str = "runs",
    **options: Any,
) -> type[tune.Trainable]:
    """The class of a trial, for `tune.Tuner`. Each trial trains the task with what `param_space` says.

    A trial reports what `report` of `gem_worker.ray.train` gets, after each evaluation; `done` says that the run is complete. A
    trial that Tune stops ends in order. One that Tune starts again goes on with its run, if it finds the run's folder.

    Args:
        task: As for `gem_worker.ray.train`.
        workers: Number of workers of each trial.
        resources_per_worker: As for `gem_worker.ray.train`. Tune reserves as much for each actor, and one CPU for the trial's
            server and evaluations.
        runs: Folder for the trials' runs; each has its trial's name. Nodes that share it can go on with each other's runs.
        options: As for `gem_worker.ray.train`, such as epochs=40; all but the labels and the spread of nodes. The keys of
            `param_space` are such options too, such as "learning_rate" or "workers".
    """
    arguments = {"task": task, "workers": workers, "resources_per_worker": resources_per_worker, **options}
    return type("gem", (_Trial,), {"arguments": arguments, "runs": Path(runs).absolute()})


class _Trial(tune.Trainable):  # type: ignore[misc]
    """A run in a thread. Each step of the trial is the next evaluation of the run, which waits until Tune asks for one more."""

    arguments: dict[str, Any]  # of `gem_worker.ray.train`
    runs: Path

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        arguments = cls.arguments | config
        actors = min(arguments["workers"], arguments.get("processes") or arguments["workers"])
        for_actor = dict(arguments["resources_per_worker"] or {"CPU": 1})
        return tune.PlacementGroupFactory([{"CPU": 1}, *[for_actor] * actors])

    def setup(self, config: dict[str, Any]) -> None:
        self._steps: SimpleQueue[dict[str, Any] | BaseException] = SimpleQueue()
        self._asked = threading.Semaphore(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(config,), name="gem-run", daemon=True)

    def step(self) -> dict[str, Any]:
        if self._thread.ident is None:
            self._thread.start()
        self._asked.release()
        found = self._steps.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """The run's folder has its checkpoints; Tune gets the folder's name, which belongs to the trial."""
        return {"run": self.trial_name}

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError if the checkpoint is that of another trial, as in population based training."""
        if checkpoint["run"] != self.trial_name:
            raise ValueError(f"{self.trial_name} can't go on from {checkpoint['run']}: the state of a run is its server's")

    def cleanup(self) -> None:
        """Ends the run, if it has not ended: its workers leave, and its server writes a checkpoint."""
        self._stopped = True
        self._asked.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, config: dict[str, Any]) -> None:
        folder = self.runs / self.trial_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._await_step()
            gem_worker.ray.train(**self.arguments | config, resume=folder, report=self._report)
        except _Stopped:
            pass
        except BaseException as error:
            self._steps.put(error)

    def _report(self, metrics: dict[str, Any]) -> None:
        self._steps.put(metrics)
        if not metrics["done"]:
            self._await_step()

    def _await_step(self) -> None:
        """Waits until Tune asks for one more step. Raises _Stopped if it does not want any."""
        self._asked.acquire()
        if self._stopped:
            raise _Stopped
