"""Writes a run for TensorBoard: event files in a folder of the run's own."""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gem_ctl.track.tracker import Tracker, failing


def open_tracker(to: str | None) -> Tracker:
    return _TensorBoard(Path(to or "tensorboard"))


class _TensorBoard:
    """A folder of event files. TensorBoard shows those of several processes in one folder as one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter

    def start(self, run_id: str, settings: dict[str, Any]) -> dict[str, int]:
        self._folder /= run_id
        with self._errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            past = EventAccumulator(str(self._folder), size_guidance={"scalars": 1})  # the newest value of each
            past.Reload()
            known = {name: past.Scalars(name)[-1].step for name in past.Tags()["scalars"]}
            self._writer = EventFileWriter(str(self._folder))
            if not known:
                self._add(hparams_pb(settings, trial_id=run_id), 0)
        return known

    def log(self, version: int, metrics: dict[str, float]) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with self._errors():
            self._add(summary_pb2.Summary(value=values), version)

    def save_model(self, path: Path) -> str:
        with self._errors():
            return str(shutil.copyfile(path, self._folder / "model.safetensors"))

    def finish(self, outcome: str | None) -> None:
        with self._errors():
            if outcome is not None:
                status = api_pb2.STATUS_SUCCESS if outcome == "complete" else api_pb2.STATUS_FAILURE
                self._add(_session_end(status), 0)
            self._writer.close()

    def where(self) -> str:
        return f"tensorboard --logdir {self._folder.parent}"

    def _errors(self) -> AbstractContextManager[None]:
        return failing(f"can't write TensorBoard's files in {self._folder}", (OSError, ValueError))

    def _add(self, summary: summary_pb2.Summary, version: int) -> None:
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=version, summary=summary))
        self._writer.flush()


def _session_end(status: int) -> summary_pb2.Summary:
    """The run's end, for TensorBoard's table of hyper-parameters. TensorBoard's own function for it needs TensorFlow."""
    data = plugin_data_pb2.HParamsPluginData(
        session_end_info=plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    )
    value = summary_pb2.Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    return summary_pb2.Summary(value=[value])
