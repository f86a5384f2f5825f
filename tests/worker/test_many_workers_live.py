"""gem-worker --workers: several logical workers in one process, against a real server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from kit.model import ended, version, workers
from kit.process import PATIENCE, Process, running
from kit.server import Live, config, serving, wait_until
from kit.settings import configured

pytestmark = pytest.mark.long

TASK = """
import threading

import kit.task


class Line(kit.task.Line):
    def training_data(self):
        print("the data is loaded", flush=True)
        return super().training_data()

    def loss(self, model, batch):
        if threading.current_thread().name == "ann-1":
            return self.fail(super().loss(model, batch))
        return super().loss(model, batch)

    def fail(self, loss):
        return loss


class OneDiverges(Line):
    def fail(self, loss):
        return float("nan") * loss


class OneBreaks(Line):
    def fail(self, loss):
        raise RuntimeError("a bug in the task")
"""


def process(folder: Path, live: Live, *arguments: str, task: str = "Line") -> AbstractContextManager[Process]:
    """A gem-worker called ann for the length of a `with` block."""
    (folder / "lines.py").write_text(TASK)
    return running(folder, "-m", "gem_worker", f"--server={live.address}", "--name=ann", f"--task=lines:{task}", *arguments)


@pytest.fixture
def endless() -> Iterator[Live]:
    """A run that a test does not see the end of."""
    with serving(config(Hyperparameters(epochs=1_000_000, batch_size=16, shard_size=32))) as live:
        yield live


def test_three_workers_of_a_process_train_to_the_end_under_names_of_their_own(tmp_path: Path) -> None:
    settings = Hyperparameters(rule="downpour", epochs=0, steps=7, shards="replicate", batch_size=16)
    with (
        serving(config(settings)) as live,
        process(tmp_path, live, "--workers=3", "--first-worker=4", configured(stopped_status=143)) as ann,
    ):
        assert ann.wait() == 0, ann.log
        assert version(live) == 21
        assert ended(live) == {"left": 3}
    done = ann.events("done")
    assert {entry["worker"]: entry["commits"] for entry in done} == {"ann-4": 7, "ann-5": 7, "ann-6": 7}
    (last,) = ann.events("ended")
    assert last["workers"] == 3
    assert last["compute_seconds"] > 0
    assert ann.output.count("the data is loaded") == 1


@pytest.mark.parametrize(("stopped_status", "names"), [(0, ["ann-0", "ann-1", "ann-2"]), (143, ["ann"])])
def test_sigterm_has_every_worker_leave_and_hand_back_its_shard(
    tmp_path: Path, endless: Live, stopped_status: int, names: list[str]
) -> None:
    with process(tmp_path, endless, f"--workers={len(names)}", configured(stopped_status=stopped_status)) as ann:
        wait_until(lambda: sorted(workers(endless)) == names and version(endless) > 30, "the workers to train", PATIENCE)
        ann.process.send_signal(signal.SIGTERM)
        assert ann.wait() == stopped_status, ann.log
        assert ended(endless) == {"left": len(names)}
        assert workers(endless) == []
    assert sorted(entry["worker"] for entry in ann.events("stopped; left the run")) == names
    assert "Traceback" not in ann.log


def test_ctrl_c_ends_workers_that_sleep_through_a_simulated_step(tmp_path: Path, endless: Live) -> None:
    with process(tmp_path, endless, "--workers=2", configured(step_seconds=3600)) as ann:
        wait_until(lambda: len(workers(endless)) == 2, "two workers to join", PATIENCE)
        ann.process.send_signal(signal.SIGINT)
        assert ann.wait() == 0, ann.log
        assert ended(endless) == {"left": 2}, ann.log
        assert version(endless) == 0


def test_a_worker_that_is_stopped_before_it_joins_ends_with_the_stopped_status(tmp_path: Path) -> None:
    with serving(config(Hyperparameters())) as gone:
        pass
    with process(tmp_path, gone, configured(stopped_status=143)) as ann:
        wait_until(lambda: "no server at" in ann.log, "a try to reach the server", PATIENCE)
        ann.process.send_signal(signal.SIGTERM)
        assert ann.wait() == 143, ann.log
    assert ann.events("stopped before joining the run")


# The main thread blocks the signal, so the thread `other` receives it, and nothing interrupts the main thread.
SIGNAL_FOR_ANOTHER_THREAD = """
import signal, sys, threading

import structlog
from gem_worker.command import stop_on_signals
from gem_worker.process.pool import WorkerPool
from gem_worker.process.stopping import Stopping
from gem_worker.process.worker_thread import WorkerThread

threading.Thread(target=threading.Event().wait, daemon=True, name="other").start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
stop_on_signals()
stopping = Stopping()

def connect():
    print("the worker runs", flush=True)
    stopping.sleep(3600)

pool = WorkerPool([WorkerThread("ann", connect, None, stopping, structlog.get_logger())], stopping)
sys.exit(0 if pool.run() else 1)
"""


def test_a_signal_that_another_thread_receives_stops_the_workers() -> None:
    command = [sys.executable, "-c", SIGNAL_FOR_ANOTHER_THREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ann:
        try:
            assert ann.stdout is not None
            assert ann.stdout.readline() == "the worker runs\n"
            ann.send_signal(signal.SIGTERM)
            assert ann.wait(PATIENCE) == 0
        finally:
            ann.kill()


@pytest.mark.parametrize(
    ("task", "status", "event"), [("OneDiverges", 3, "training diverged"), ("OneBreaks", 1, "the task failed")]
)
def test_a_worker_that_fails_is_named_and_the_others_finish(tmp_path: Path, task: str, status: int, event: str) -> None:
    settings = Hyperparameters(rule="downpour", epochs=0, steps=5, shards="replicate", batch_size=16)
    with serving(config(settings)) as live, process(tmp_path, live, "--workers=3", task=task) as ann:
        assert ann.wait() == status, ann.log
        assert version(live) == 10
        assert workers(live) == []
    (failed,) = ann.events(event)
    assert failed["worker"] == "ann-1"
    assert {entry["worker"] for entry in ann.events("done")} == {"ann-0", "ann-2"}
    assert ("a bug in the task" in failed.get("exception", "")) == (task == "OneBreaks")
