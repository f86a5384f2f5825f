"""Follows a run into MLflow: a tracking server, or a local store if the full package mlflow is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A server that is away is noticed after seconds, not after minutes; `follow` tries again.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

from gem_api.process.printable import without_password
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from gem_ctl.track.tracker import DEFAULT_PROJECT, Tracker, TrackerError, failing

_TAG = "gem.run_id"
_MAX_TEXT = 500  # characters of a parameter, which every store accepts
_STATUSES = {"complete": "FINISHED", "stopped": "KILLED"}


def open_tracker(to: str | None) -> Tracker:
    """`to` is the tracking URI; None leaves it to MLFLOW_TRACKING_URI, else to MLflow's own default."""
    return _MLflow(to)


class _MLflow:
    """A run of the experiment MLFLOW_EXPERIMENT_NAME, or "gem". A tag has the run's id, so that it is found again."""

    def __init__(self, uri: str | None) -> None:
        with _errors():
            self._client = MlflowClient(uri)
        self._run: str
        self._experiment: str

    def start(self, run_id: str, settings: dict[str, Any]) -> dict[str, int]:
        with _errors():
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
            found = self._client.get_experiment_by_name(name)
            self._experiment = found.experiment_id if found else self._client.create_experiment(name)
            runs = self._client.search_runs([self._experiment], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
            run = runs[0] if runs else self._client.create_run(self._experiment, tags={_TAG: run_id}, run_name=run_id)
            self._run = run.info.run_id
            params = [Param(key, str(value)[:_MAX_TEXT]) for key, value in settings.items() if key not in run.data.params]
            self._client.log_batch(self._run, params=params)
            if runs:
                self._client.update_run(self._run, "RUNNING")
            return {key: max(one.step for one in self._client.get_metric_history(self._run, key)) for key in run.data.metrics}

    def log(self, version: int, metrics: dict[str, float]) -> None:
        now = round(1000 * time.time())
        with _errors():
            self._client.log_batch(self._run, [Metric(key, value, now, version) for key, value in metrics.items()])

    def save_model(self, path: Path) -> str:
        with _errors():
            self._client.log_artifact(self._run, str(path))
        return f"artifact {path.name}"

    def finish(self, outcome: str | None) -> None:
        if outcome is None:
            return  # the run goes on
        with _errors():
            self._client.set_tag(self._run, "gem.outcome", outcome)
            self._client.set_terminated(self._run, _STATUSES.get(outcome, "FAILED"))

    def where(self) -> str:
        return f"{without_password(self._client.tracking_uri)}, experiment {self._experiment}, run {self._run}"


@contextmanager
def _errors() -> Iterator[None]:
    try:
        with failing("MLflow", (MlflowException, OSError)):
            yield
    except ModuleNotFoundError as error:
        raise TrackerError(
            f"MLflow's local store needs {error.name}: pip install mlflow, or name a server: --to http://HOST:5000"
        ) from error
