"""The parts of a process with several workers, one by one: names, shared task, distribution, metrics, exit statuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import structlog
import torch
from gem_api.errors import LeaseEnded, NonFiniteGradient, Quarantined
from gem_worker.command import STOPPED, Stopped
from gem_worker.launcher.cluster import spread
from gem_worker.process import pool as pool_module
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.pool import WorkerPool
from gem_worker.process.stopping import Stopping
from gem_worker.process.trainer import starts
from gem_worker.process.worker_thread import WorkerThread, worst
from kit.server import wait_until
from kit.task import Line
from prometheus_client.registry import CollectorRegistry
from structlog.testing import CapturingLogger
from torch.utils.data import TensorDataset

WAIT = 30.0


class Counting(Line):
    """A task that counts how often its data is loaded."""

    loaded = 0

    def training_data(self) -> TensorDataset:
        self.loaded += 1
        return super().training_data()


class FakeSession:
    """A session that notes how it ended: left in order, broken off."""

    shares_memory = False
    stalled = False

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.broken_off = threading.Event()

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.ends.append("closed" if kind is None else "broken off")
        if kind is not None:
            self.broken_off.set()


def worker(name: str, train: Any, stopping: Stopping | None = None) -> tuple[WorkerThread, FakeSession]:
    session = FakeSession()
    connect: Any = lambda: session  # noqa: E731
    return WorkerThread(name, connect, train, stopping or Stopping(), structlog.get_logger()), session


def raising(error: BaseException) -> Any:
    def train(session: Any) -> int:
        raise error

    return train


@pytest.mark.parametrize(
    ("workers", "processes", "sizes"),
    [(4, 4, [1, 1, 1, 1]), (100, 4, [25] * 4), (5, 3, [1, 2, 2]), (2, 8, [1, 1]), (1, 1, [1])],
)
def test_workers_are_spread_evenly_and_each_is_in_one_process(workers: int, processes: int, sizes: list[int]) -> None:
    groups = spread(workers, processes)
    assert [len(group) for group in groups] == sizes
    assert [number for group in groups for number in group] == list(range(workers))


def test_all_workers_of_a_process_have_equal_models_of_their_own_and_the_same_data() -> None:
    task = Counting()
    torch.manual_seed(99)
    mine = starts(task, 5, 3)
    torch.manual_seed(5)
    first = next(task.model().parameters())
    weights = [next(start.model.parameters()) for start in mine]
    assert all(torch.equal(weight, first) for weight in weights)
    assert len({weight.data_ptr() for weight in weights}) == 3
    assert task.loaded == len({id(start.data) for start in mine}) == 1


def test_the_metrics_of_several_threads_are_summed() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)

    def work() -> None:
        for _ in metrics.timing("data", range(500)):
            with metrics.phase("compute"):
                metrics.trained(1.5, 0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    for phase in ("data", "compute"):
        assert registry.get_sample_value("gem_worker_step_seconds_count", {"phase": phase}) == 2000
    assert metrics.seconds().keys() == {"data", "compute"}
    assert registry.get_sample_value("gem_worker_loss") == 1.5


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NonFiniteGradient("no number"), 3),
        (Quarantined("too often"), 4),
        (LeaseEnded("replaced", "replaced"), 1),
        (ValueError("a bug of the task's"), 1),
        (SystemExit(0), 1),
        (GeneratorExit(), 1),
        (Stopped(), STOPPED),
    ],
)
def test_a_worker_that_ends_has_a_status_that_says_why(error: BaseException, status: int) -> None:
    one, session = worker("ann", raising(error))
    one.work()
    assert one.status == status
    assert "broken off" in session.ends


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([0, 0], 0),
        ([0, STOPPED], STOPPED),
        ([3, STOPPED], 3),
        ([3, 4, 0], 4),
        ([1, 4, 3], 1),
        ([None, 0], STOPPED),
        ([], 0),
    ],
)
def test_a_process_ends_with_the_worst_of_its_workers(statuses: list[int | None], status: int) -> None:
    workers = [worker(str(number), raising(Stopped()))[0] for number in range(len(statuses))]
    for one, each in zip(workers, statuses, strict=True):
        one.status = each
    assert worst(workers) == status


def test_a_task_that_exits_is_told_in_one_line() -> None:
    one, _ = worker("ann", raising(SystemExit("the data\nis gone")))
    one.log = told = CapturingLogger()
    one.work()
    (call,) = told.calls
    assert call.method_name == "error"
    assert call.kwargs == {"why": r"SystemExit('the data\nis gone')"}


def test_a_worker_that_ended_without_a_status_has_failed() -> None:
    class Broken(FakeSession):
        def __exit__(self, kind: Any, *_: object) -> None:
            if self.ends:
                raise OSError("it has left already")
            super().__exit__(kind)

    session: Any = Broken()
    one = WorkerThread("ann", lambda: session, raising(Stopped()), Stopping(), structlog.get_logger())
    with pytest.raises(OSError, match="left already"):
        one.work()
    assert one.status is None
    assert worst([one]) == 1


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate 2.00 GiB.\nmore", "MPS backend out of memory (MPS ...)"]
)
def test_out_of_memory_of_the_device_has_one_line_that_says_what_to_do(text: str) -> None:
    session: Any = FakeSession()
    log = CapturingLogger()
    one = WorkerThread("ann", lambda: session, raising(torch.OutOfMemoryError(text)), Stopping(), log)
    one.work()
    ((_, (event,), values),) = log.calls
    assert "smaller --batch-size" in event
    assert values == {"why": text.partition("\n")[0]}
    assert one.status == 1


def test_the_others_go_on_when_a_worker_fails() -> None:
    failed = threading.Event()

    def goes_on(session: Any) -> int:
        assert failed.wait(WAIT)
        return 12

    def fails(session: Any) -> int:
        failed.set()
        raise NonFiniteGradient("no number")

    stopping = Stopping()
    (ann, left), (bob, _) = worker("ann", goes_on, stopping), worker("bob", fails, stopping)
    assert WorkerPool([ann, bob], stopping).run() is False
    assert (ann.status, bob.status) == (0, 3)
    assert left.ends == ["closed"]


def test_a_worker_inside_a_long_step_leaves_when_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_STEP_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "ignore_signals", lambda: None)
    stopping, computing = Stopping(), threading.Event()
    left: list[FakeSession] = []

    def long_step(session: FakeSession) -> int:
        left.append(session)
        computing.set()
        assert session.broken_off.wait(WAIT)
        raise ValueError("its session is closed")

    def steps(session: Any) -> int:
        while True:
            stopping.sleep(WAIT)

    (ann, _), (bob, bobs) = worker("ann", long_step, stopping), worker("bob", steps, stopping)
    pool = WorkerPool([ann, bob], stopping)

    def wait() -> None:
        """What SIGTERM does to the main thread while it waits."""
        assert computing.wait(WAIT)
        raise Stopped

    monkeypatch.setattr(pool, "_wait_for_an_end", wait)
    assert pool.run() is True
    wait_until(lambda: ann.status is not None and bob.status is not None, "both to end")
    assert (ann.status, bob.status) == (STOPPED, STOPPED)
    assert left[0].ends[0] == "broken off"
    assert "broken off" in bobs.ends


def test_a_stalled_worker_ends_its_process_as_failed_and_the_others_leave_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_STEP_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "_LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "ignore_signals", lambda: None)
    stopping, release = Stopping(), threading.Event()

    def hangs(session: FakeSession) -> int:
        session.stalled = True
        release.wait()
        return 0

    def steps(session: Any) -> int:
        while True:
            stopping.sleep(WAIT)

    (ann, _), (bob, bobs) = worker("ann", hangs, stopping), worker("bob", steps, stopping)
    pool = WorkerPool([ann, bob], stopping)
    assert pool.run() is False
    assert pool.busy
    assert worst([ann, bob]) == 1
    assert set(bobs.ends) == {"broken off"}
    release.set()
