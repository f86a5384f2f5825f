"""What the cluster does with members that another program places and restarts, without a process."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_worker.launcher.cluster import MAX_RESTARTS, Cluster, ClusterError, Member, ends_together


@dataclass
class Placed(Member):
    """A member whose state a test sets."""

    ending: int | None = None
    has_place: bool = True
    news: str | None = None
    starts: int = 0
    signals: list[signal.Signals] = field(default_factory=list)

    def start(self, *extra: str) -> None:
        self.starts += 1
        self.ending = None

    @property
    def status(self) -> int | None:
        return self.ending

    @property
    def waiting(self) -> bool:
        return not self.has_place

    def restarted(self) -> str | None:
        news, self.news = self.news, None
        return news

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def wait(self, seconds: float) -> None:
        pass


@pytest.fixture
def workers(tmp_path: Path) -> list[Placed]:
    return [Placed(f"worker-{number}", tmp_path / f"{number}.log") for number in range(3)]


def cluster(workers: list[Placed], *, together: bool = True) -> tuple[Cluster, list[str]]:
    said: list[str] = []
    return Cluster([], [*workers], said.append, ends_together=together), said


def test_a_partitioned_run_is_over_although_a_worker_has_no_place(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    workers[0].ending, workers[2].has_place = 0, False
    assert not all_.finished, "worker-1 has not left yet"
    workers[1].ending = 0
    assert all_.finished


def test_no_worker_done_is_no_end(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    for worker in workers:
        worker.has_place = False
    assert not all_.finished


def test_a_run_with_steps_for_each_worker_waits_for_all(workers: list[Placed]) -> None:
    all_, _ = cluster(workers, together=False)
    workers[0].ending, workers[1].ending, workers[2].has_place = 0, 0, False
    assert not all_.finished


@pytest.mark.parametrize(
    ("run", "together"),
    [
        (Hyperparameters(epochs=3), True),
        (Hyperparameters(epochs=0, steps=10), False),
        (Hyperparameters(epochs=3, steps=10), False),
        (Hyperparameters(epochs=3, shards="replicate"), False),
    ],
)
def test_which_runs_end_for_all_at_once(run: Hyperparameters, together: bool) -> None:
    assert ends_together(run) is together


def test_a_restart_by_another_program_is_told_and_not_repeated(workers: list[Placed]) -> None:
    all_, said = cluster(workers)
    workers[1].news = "died; Ray restarted it on node2"
    all_.tend(healthy=False)
    all_.tend(healthy=False)
    assert said == ["worker-1 died; Ray restarted it on node2"]
    assert [worker.starts for worker in workers] == [0, 0, 0]


def test_a_worker_that_keeps_dying_elsewhere_ends_the_run(workers: list[Placed]) -> None:
    """But not if there are commits in between."""
    all_, _ = cluster(workers)
    workers[0].log.write_text("a last line\n")
    for _ in range(MAX_RESTARTS + 1):
        workers[0].news = "died"
        all_.tend(healthy=True)
    for _ in range(MAX_RESTARTS - 1):
        workers[0].news = "died"
        all_.tend(healthy=False)
    workers[0].news = "died"
    with pytest.raises(ClusterError, match="worker-0 died:\na last line\nfull log: "):
        all_.tend(healthy=False)


def test_a_worker_with_a_wrong_option_ends_the_run_before_the_first_commit(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    workers[1].ending = 2
    with pytest.raises(ClusterError, match="worker-1 ended with status 2"):
        all_.tend(healthy=False)


def test_a_worker_whose_machine_lacks_something_is_started_again_once_there_were_commits(workers: list[Placed]) -> None:
    all_, said = cluster(workers)
    all_.tend(healthy=True)
    for _ in range(MAX_RESTARTS):
        workers[1].ending = 2
        all_.tend(healthy=False)
    assert workers[1].starts == MAX_RESTARTS
    workers[1].ending = 2
    with pytest.raises(ClusterError, match="worker-1 ended with status 2"):
        all_.tend(healthy=False)
    assert said == ["worker-1 ended with status 2; restarting it"] * MAX_RESTARTS
