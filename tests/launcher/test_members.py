"""What the cluster does with its members when they die, without a process; and the command lines of several servers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.host_limits import apply_threads
from gem_api.process.options import as_environment, expanded
from gem_api.process.settings import settings_of
from gem_api.ranges import WHOLE, Range
from gem_api.v1 import training_pb2 as pb
from gem_server.cli import main as gem_server
from gem_worker.launcher import copies
from gem_worker.launcher.cli import main as gem_train
from gem_worker.launcher.cluster import (
    MAX_RESTARTS,
    PAUSES,
    Cluster,
    ClusterError,
    Member,
    Process,
    WrongSettings,
    ends_together,
)
from gem_worker.launcher.members import Place, ThisMachine, make_cluster, places
from gem_worker.launcher.options import hyperparameters_of, run_options
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.process.cli import main as gem_worker
from kit.settings import configured


@dataclass
class Placed(Member):
    """A member whose state a test sets."""

    ending: int | None = None
    has_place: bool = True
    news: str | None = None
    starts: int = 0
    signals: list[signal.Signals] = field(default_factory=list)
    heard: Callable[[str], object] = str

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
        self.heard(self.name)

    def wait(self, seconds: float) -> None:
        pass


@pytest.fixture
def workers(tmp_path: Path) -> list[Placed]:
    return [Placed(f"worker-{number}", tmp_path / f"{number}.log") for number in range(3)]


def cluster(workers: list[Placed], *, together: bool = True) -> tuple[Cluster, list[str]]:
    said: list[str] = []
    return Cluster([], [*workers], said.append, ends_together=together), said


WAITS = "waits"  # for a place


@pytest.mark.parametrize(
    ("endings", "together", "state", "over"),
    [
        pytest.param((0, None, WAITS), True, pb.RUN_STATE_COMPLETE, False, id="a worker has not left yet"),
        pytest.param((0, 0, WAITS), True, None, False, id="the server has not said so"),
        pytest.param((0, 0, WAITS), True, pb.RUN_STATE_COMPLETE, True, id="a worker that has no place does not matter"),
        pytest.param((0, 0, WAITS), False, pb.RUN_STATE_COMPLETE, False, id="with steps for each worker, all matter"),
        pytest.param((0, 0, 0), True, pb.RUN_STATE_DRAINING, False, id="the state says nothing of the run"),
        pytest.param((0, 0, 0), True, pb.RUN_STATE_STALLED, False, id="nor does this one"),
        pytest.param((3, 3, 3), True, None, True, id="all have diverged"),
        pytest.param((WAITS, WAITS, WAITS), True, None, False, id="none has begun"),
    ],
)
def test_when_a_run_is_over(
    workers: list[Placed], endings: tuple[int | str | None, ...], together: bool, state: pb.RunState | None, over: bool
) -> None:
    all_, _ = cluster(workers, together=together)
    for worker, ending in zip(workers, endings, strict=True):
        worker.has_place, worker.ending = ending != WAITS, ending if isinstance(ending, int) else None
    if state is not None:
        all_.asked(state, all_.done)
        all_.supervise(healthy=True, now=0.0)
    assert all_.finished == over
    assert [worker.starts for worker in workers] == [0, 0, 0]


def test_a_worker_that_ends_well_before_the_run_is_complete_is_started_again(workers: list[Placed]) -> None:
    """Somebody has stopped it, or its task ends the process."""
    all_, said = cluster(workers)
    workers[1].ending = 0
    all_.asked(pb.RUN_STATE_TRAINING, ())  # asked before it ended
    all_.supervise(healthy=True, now=0.0)
    assert (workers[1].starts, said) == (0, [])
    all_.asked(pb.RUN_STATE_TRAINING, all_.done)
    all_.supervise(healthy=True, now=1.0)
    all_.supervise(healthy=True, now=2.0)  # the server did not answer
    assert workers[1].starts == 1
    assert said == ["worker-1 ended with status 0, but the run is not complete; restarting it"]


@pytest.mark.parametrize("status", [2, -9])
def test_a_worker_that_dies_at_its_end_fails_no_complete_run(workers: list[Placed], status: int) -> None:
    all_, said = cluster(workers)
    all_.asked(pb.RUN_STATE_COMPLETE, ())
    workers[0].ending = workers[1].ending = 0
    workers[2].ending = status
    for now in range(100):
        all_.supervise(healthy=True, now=float(now))
    assert all_.finished
    assert (workers[2].starts, said) == (0, [])


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
    all_.supervise(healthy=False, now=0.0)
    all_.supervise(healthy=False, now=0.0)
    assert said == ["worker-1 died; Ray restarted it on node2"]
    assert [worker.starts for worker in workers] == [0, 0, 0]


def test_a_worker_that_keeps_dying_elsewhere_ends_the_run_before_its_first_commit(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    workers[0].log.write_text("a last line\n")
    for _ in range(MAX_RESTARTS):
        workers[0].news = "died"
        all_.supervise(healthy=False, now=0.0)
    workers[0].news = "died"
    with pytest.raises(ClusterError, match="worker-0 died:\na last line\nfull log: "):
        all_.supervise(healthy=False, now=0.0)


def test_a_worker_with_a_wrong_option_ends_the_run_before_the_first_commit(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    workers[1].ending = 2
    with pytest.raises(ClusterError, match="worker-1 ended with status 2"):
        all_.supervise(healthy=False, now=0.0)


def test_a_worker_whose_task_raised_waits_until_the_others_had_time_to_fail_alike(workers: list[Placed]) -> None:
    """If it were started again at once, its start would slow down theirs."""
    all_, said = cluster(workers)
    raised = 'Traceback (most recent call last):\n  File "own.py", line 1, in loss\n    broken\nNameError: broken\n'
    for worker in workers:
        worker.log.write_text(raised)
    workers[0].ending = 1
    all_.supervise(healthy=False, now=0.0)
    all_.supervise(healthy=False, now=4.9)
    assert (workers[0].starts, said) == (0, ["worker-0 ended with status 1; restarting it in 5 s"])
    workers[1].ending = 1
    all_.supervise(healthy=False, now=4.9)
    workers[2].ending = 1
    with pytest.raises(ClusterError, match="every worker failed before its first commit"):
        all_.supervise(healthy=False, now=4.9)
    assert [worker.starts for worker in workers] == [0, 0, 0]


def failing(all_: Cluster, worker: Placed, now: float = 0.0, status: int = 1) -> float:
    """Has a worker fail until it is given up; returns how long it was not running. The others make commits all the time."""
    paused = 0.0
    while worker.name not in all_.given_up:
        worker.ending = status
        all_.supervise(healthy=True, now=now)
        while worker.due is not None:
            paused, now = paused + 0.5, now + 0.5
            all_.supervise(healthy=True, now=now)
    return paused


@pytest.mark.parametrize("status", [1, 2, -9])
def test_a_worker_that_keeps_failing_is_given_up_after_longer_and_longer_pauses(workers: list[Placed], status: int) -> None:
    all_, said = cluster(workers, together=False)
    all_.supervise(healthy=True, now=0.0)
    workers[1].log.write_text("no such device\n")
    assert failing(all_, workers[1], status=status) == sum(PAUSES)
    assert workers[1].starts == MAX_RESTARTS
    assert [line.partition("; ")[2] for line in said[:-1]] == [
        "restarting it", *(f"restarting it in {pause:g} s" for pause in PAUSES[1:])
    ]  # fmt: skip
    assert said[-1].startswith("going on without a worker that failed 6 times in a row: worker-1 ")
    assert "no such device\nfull log: " in said[-1]
    assert signal.SIGKILL in workers[1].signals, "Ray would start it again"
    count = len(said)
    all_.supervise(healthy=True, now=1000.0)
    assert (len(said), workers[1].starts) == (count, MAX_RESTARTS)
    workers[0].ending = workers[2].ending = 0
    assert all_.finished


def test_a_worker_that_has_run_for_a_minute_begins_to_count_anew(workers: list[Placed]) -> None:
    all_, said = cluster(workers)
    for hour in range(2 * MAX_RESTARTS):
        workers[1].ending = -9
        all_.supervise(healthy=True, now=3600.0 * hour)
        all_.supervise(healthy=True, now=3600.0 * hour + 59.0)
        assert workers[1].restarts == 1, "a short life proves nothing: the commits may be those of others"
        all_.supervise(healthy=False, now=3600.0 * hour + 61.0)
        assert workers[1].restarts == 1, "nor does a long one without commits"
        all_.supervise(healthy=True, now=3600.0 * hour + 62.0)
        assert workers[1].restarts == 0
    assert said == ["worker-1 was killed by SIGKILL; restarting it"] * 2 * MAX_RESTARTS


def test_a_worker_that_dies_elsewhere_again_and_again_is_ended_there_and_given_up(workers: list[Placed]) -> None:
    all_, said = cluster(workers)
    for _ in range(MAX_RESTARTS + 1):
        workers[1].news = "died"
        all_.supervise(healthy=True, now=0.0)
    assert (all_.given_up, workers[1].signals, workers[1].starts) == (["worker-1"], [signal.SIGKILL], 0)
    assert len(said) == MAX_RESTARTS + 1


def test_time_in_which_a_worker_waits_for_a_place_proves_nothing(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    workers[1].ending, workers[1].has_place = 1, False
    all_.supervise(healthy=True, now=0.0)
    all_.supervise(healthy=True, now=1000.0)
    assert workers[1].restarts == 1


def test_the_last_worker_that_keeps_failing_ends_the_run(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    failing(all_, workers[0])
    failing(all_, workers[1])
    with pytest.raises(ClusterError, match="worker-2 ended with status 1"):
        failing(all_, workers[2])


def test_the_end_of_the_run_does_not_wait_for_a_restart(workers: list[Placed]) -> None:
    all_, _ = cluster(workers)
    for _ in range(2):
        workers[1].ending = 1
        all_.supervise(healthy=True, now=0.0)
    assert workers[1].due is not None
    assert not all_.finished
    workers[0].ending = workers[2].ending = 0
    all_.asked(pb.RUN_STATE_COMPLETE, all_.done)
    assert all_.finished


# -- several servers


@pytest.fixture
def servers(tmp_path: Path) -> list[Placed]:
    return [Placed(f"server-{number}", tmp_path / f"server-{number}.log") for number in range(3)]


def test_each_server_that_dies_is_started_again(servers: list[Placed], workers: list[Placed]) -> None:
    said: list[str] = []
    all_ = Cluster([*servers], [*workers], said.append)
    all_.supervise(healthy=True, now=0.0)
    for number in (2, 0):
        servers[number].ending = -9
        all_.supervise(healthy=False, now=0.0)
    assert said == ["server-2 was killed by SIGKILL; restarting it", "server-0 was killed by SIGKILL; restarting it"]
    assert [server.starts for server in servers] == [1, 0, 1]


@pytest.mark.parametrize(
    ("committed", "error", "words"),
    [(False, WrongSettings, "^no such thing$"), (True, ClusterError, "server-2 ended with status 2")],
)
def test_a_server_that_rejects_its_settings_ends_the_run(
    servers: list[Placed], committed: bool, error: type[ClusterError], words: str
) -> None:
    all_ = Cluster([*servers], [], print)
    all_.supervise(healthy=committed, now=0.0)
    servers[2].ending = 2
    servers[2].log.write_text("gem-server: no such thing\n")
    with pytest.raises(error, match=words):
        all_.supervise(healthy=False, now=0.0)


def test_all_servers_are_stopped_after_the_workers(servers: list[Placed], workers: list[Placed]) -> None:
    order: list[str] = []
    for member in (*servers, *workers):
        member.heard = order.append
    Cluster([*servers], [*workers], print).stop()
    assert order == [member.name for member in (*workers, *servers)]


def command_lines(tmp_path: Path, *arguments: str, servers: int) -> list[dict[str, Any]]:
    """The options that the servers of a gem-train get."""
    options, _ = run_options(gem_train.make_context("gem-train", ["--servers", str(servers), *arguments]))
    listening = [Place(f"127.0.0.1:{1000 + number}", f"127.0.0.1:{2000 + number}") for number in range(servers)]
    made = make_cluster(RunFolder(tmp_path), options, hyperparameters_of(options), listening, ThisMachine(), resume=False)
    workers = [member.command for member in made.workers if isinstance(member, Process)]
    assert all({"--server=127.0.0.1:1000", f"--log-level={options['log_level']}"} <= set(command) for command in workers)
    processes = [member for member in made.servers if isinstance(member, Process)]
    assert len(processes) == servers
    return [read(process) for process in processes]


def read(process: Process) -> dict[str, Any]:
    """What gem-server reads from its command line and its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_environment(process.settings).items():
            patch.setenv(name, value)
        options, _ = expanded(gem_server.make_context("gem-server", process.command[3:]))
    return options


def test_settings_of_the_file_reach_the_servers_and_win_over_gem_trains_own(tmp_path: Path) -> None:
    own, several = command_lines(tmp_path, servers=1), command_lines(tmp_path, servers=2)
    assert (own[0]["checkpoint_interval"], own[0]["max_norm_ratio"], own[0]["lease_seconds"]) == (10, 0, 15)
    assert several[0]["memory_limit"] < own[0]["memory_limit"]
    file = configured(checkpoint_interval=60, max_norm_ratio=100, lease_seconds=5, memory_limit="3G", listen="1.2.3.4:5")
    for given in (*command_lines(tmp_path, file, servers=1), *command_lines(tmp_path, file, servers=2)):
        found = [given[name] for name in ("checkpoint_interval", "max_norm_ratio", "lease_seconds", "memory_limit")]
        assert found == [60, 100, 5, 3 << 30]
        assert given["listen"].startswith("127.0.0.1:100")


def test_what_gem_train_and_its_workers_both_take_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = configured(step_seconds="0.5,1", turns="fixed", shared_memory=False)
    given = [file, "--overlap", "--gradient-dtype=int8", "--theta-dtype=bfloat16", "--device=cuda:1", "--task=a:B", "--data=d",
             "--log-level=error"]  # fmt: skip
    options, user_gave = run_options(gem_train.make_context("gem-train", given))
    listening = [Place("127.0.0.1:1000", "127.0.0.1:2000")]
    made = make_cluster(RunFolder(tmp_path), options, hyperparameters_of(options), listening, ThisMachine(), resume=False)
    process = made.workers[0]
    assert isinstance(process, Process)
    for name, value in as_environment(process.settings).items():
        monkeypatch.setenv(name, value)
    found = gem_worker.make_context("gem-worker", process.command[3:]).params
    shared = settings_of("train").keys() & settings_of("worker").keys()
    assert shared <= user_gave, "this test gives each another value than its default"
    assert {key: found[key] for key in shared} == {key: options[key] for key in shared}


@pytest.mark.parametrize(("device", "threads"), [("cpu", "1"), ("auto", None), ("cuda:1", None)])
def test_workers_on_the_cpu_alone_have_one_thread_of_openmp_and_are_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, threads: str | None
) -> None:
    """gem-train itself has one; a copy of it that should have more, or a GPU, would not get them."""
    spawned: list[tuple[str, Any]] = []

    def copied(name: str, arguments: list[str], output: object, variables: Any) -> Started:
        spawned.append(("copy", variables))
        return Started()

    def started(*_: object, env: Any, **__: object) -> Started:
        spawned.append(("new", env))
        return Started()

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(copies, "can_copy", lambda: True)
    monkeypatch.setattr(copies, "Copy", copied)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options, _ = run_options(gem_train.make_context("gem-train", ["--device", device, "--workers", "1"]))
    listening = [Place("127.0.0.1:1000", "127.0.0.1:2000")]
    made = make_cluster(RunFolder(tmp_path), options, hyperparameters_of(options), listening, ThisMachine(), resume=False)
    (tmp_path / "logs").mkdir(exist_ok=True)
    made.workers[0].start()
    assert [(how, given.get("OMP_NUM_THREADS")) for how, given in spawned] == [("copy" if threads else "new", threads)]


class Started:
    """A child process that was not started."""

    pid = os.getpid()


def test_several_servers_have_the_same_options_but_for_their_places(tmp_path: Path) -> None:
    given = command_lines(tmp_path, "--learning-rate", "0.02", "--log-level", "error", servers=3)
    assert [each["range"] for each in given] == [Range(index, 3) for index in range(3)]
    assert [each["peers"] for each in given] == [("127.0.0.1:1001", "127.0.0.1:1002"), (), ()]
    assert [each["listen"] for each in given] == [f"127.0.0.1:{1000 + index}" for index in range(3)]
    assert [each["metrics_listen"] for each in given] == [f"127.0.0.1:{2000 + index}" for index in range(3)]
    assert [each["checkpoint_dir"] for each in given] == [tmp_path / f"checkpoints/range-{index}" for index in range(3)]
    assert [each["history"] for each in given] == [tmp_path / "commits.csv", None, None]
    own = {"range", "peers", "listen", "metrics_listen", "checkpoint_dir", "history", "memory_socket"}
    same = [{name: value for name, value in each.items() if name not in own} for each in given]
    assert same[0] == same[1] == same[2]
    assert (same[0]["durability"], same[0]["learning_rate"], same[0]["log_level"]) == ("log", 0.02, "error")


def test_servers_share_the_cores_and_the_memory_which_one_has_alone(tmp_path: Path) -> None:
    (alone,) = command_lines(tmp_path, servers=1)
    assert (alone["range"], alone["peers"], alone["durability"], alone["apply_threads"]) == (WHOLE, (), "snapshot", 0)
    assert alone["checkpoint_dir"] == tmp_path / "checkpoints"
    for each in command_lines(tmp_path, servers=3):
        assert each["memory_limit"] == alone["memory_limit"] // 3
        assert each["apply_threads"] == apply_threads(3)


def test_free_ports_differ() -> None:
    found = places("127.0.0.1", 20)
    assert len({address for place in found for address in place}) == 40
