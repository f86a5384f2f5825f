"""Follows a run into Weights & Biases."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import wandb

from gem_ctl.track.tracker import DEFAULT_PROJECT, Tracker, failing

_VERSION = "version"  # the x axis of every plot
_errors = partial(failing, "Weights & Biases", (wandb.Error, OSError), " (WANDB_MODE=offline needs no server)")


def open_tracker(to: str | None) -> Tracker:
    """`to` is PROJECT or ENTITY/PROJECT; None leaves it to WANDB_PROJECT and WANDB_ENTITY."""
    entity, _, project = (to or "").rpartition("/")
    return _WeightsAndBiases(entity or None, project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT)


class _WeightsAndBiases:
    """A run of a project. Its id is the run's own, so that it is resumed if it is there."""

    def __init__(self, entity: str | None, project: str) -> None:
        self._entity, self._project = entity, project
        self._run: Any = None

    def start(self, run_id: str, settings: dict[str, Any]) -> dict[str, int]:
        with _errors():
            self._run = wandb.init(
                entity=self._entity,
                project=self._project,
                id=run_id,
                name=run_id,
                config=settings,
                resume="allow",
                allow_val_change=True,
                save_code=False,
            )
            self._run.define_metric("*", step_metric=_VERSION)
            last = self._run.summary.get(_VERSION)
            return {} if last is None else {name: int(last) for name in self._run.summary}

    def log(self, version: int, metrics: dict[str, float]) -> None:
        with _errors():
            self._run.log({_VERSION: version, **metrics})

    def save_model(self, path: Path) -> str:
        with _errors():
            artifact = wandb.Artifact(f"model-{self._run.id}", type="model")
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)
        return f"artifact model-{self._run.id}"

    def finish(self, outcome: str | None) -> None:
        with _errors():
            if outcome is not None:
                self._run.summary["outcome"] = outcome
            self._run.finish(exit_code=int(outcome not in (None, "complete")))

    def where(self) -> str:
        return self._run.url or f"{self._run.dir} (offline: wandb sync uploads it)"
