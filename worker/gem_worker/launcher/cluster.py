"""A cluster: server processes and their workers, restarted if they die. Workers are local processes, or run elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.addresses import host_and_port
from gem_api.process.lifetime import LAUNCHER
from gem_api.process.options import as_environment, flags, settings_without_flags
from gem_api.v1 import training_pb2 as pb

from gem_worker.command import EXIT_DIVERGED, EXIT_WRONG_USE
from gem_worker.launcher.tracebacks import same_failure, users_frames

WORKER_NICENESS = 10  # with few cores, the server must not wait for a worker that computes
PAUSES = (0.0, 2.0, 8.0, 30.0, 60.0)  # seconds before each restart in a row of a worker
MAX_RESTARTS = len(PAUSES)  # of one process in a row
_OTHERS_SECONDS = 5.0  # in which the other workers show, before the first commit, whether they fail alike
_STEADY_SECONDS = 60.0  # a worker that runs for so long, while commits are made, has recovered
_STOP_SECONDS = 20.0
_LISTEN_SECONDS = 5.0  # that workers, which would log that the server is not there, are held back at most
_OPENMP = "OMP_NUM_THREADS"


class ClusterError(Exception):
    """The cluster can't continue; the message says why and where to look."""


class WrongSettings(ClusterError):
    """A server rejected its settings at the start; the message is the server's."""


@dataclass
class Member(ABC):
    """One process of the cluster, on this machine or another.

    Attributes:
        name: The process's name in messages.
        log: The file that its output is appended to.
        restarts: Restarts in a row: of a server, since the last commit; of a worker, since it ran for a minute.
        began: When it was started last, in seconds of the launcher's clock.
        due: When to start it again; None: it is not to be started.
        log_start: Where in `log` the output of the running, or last, process begins, in bytes.
    """

    name: str
    log: Path
    restarts: int = field(default=0, kw_only=True)
    began: float = field(default=0.0, kw_only=True)
    due: float | None = field(default=None, kw_only=True)
    log_start: int = field(default=0, kw_only=True)

    @abstractmethod
    def start(self, *extra: str) -> None:
        """Starts the process; `extra` are additional flags."""

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Exit status, negative if a signal ended it; None while it runs or waits to be started."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Makes the process end: at once for SIGKILL, else it leaves the run first."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Waits for the process to end; kills it after `seconds`."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for a place to run."""
        return False

    def restarted(self) -> str | None:
        """A phrase that says how another program has restarted the process since the last call; None if it has not."""
        return None

    @property
    def running(self) -> bool:
        return self.status is None

    def logged(self) -> str:
        """The log output of the current process."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace") if self.log.exists() else ""

    def failure_excerpt(self) -> str:
        """The reason why the process ended, from its log: the user's part of a traceback, else the last lines."""
        log = self.logged()
        return users_frames(log) or "\n".join(log.splitlines()[-5:])

    def _begin_log(self) -> None:
        """The output from here on is that of a new process."""
        self.log_start = self.log.stat().st_size if self.log.exists() else 0


class Child(Protocol):
    """What members need of a child process, as of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> object: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Process(Member):
    """A member that is a child process of this one.

    Attributes:
        command: Its command line.
        settings: The settings that it gets through its environment, by their keys.
        niceness: Added to the launcher's own niceness; higher means lower priority.
        on_cpu: Whether it computes on the CPU: OpenMP then gets one thread, because the other processes compute there, too.
        process: The running, or last, process.
    """

    command: list[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    niceness: int = 0
    on_cpu: bool = True
    process: Child | None = None

    def start(self, *extra: str) -> None:
        self._begin_log()
        environment = _environment(self.settings) | {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
        environment.pop(_OPENMP, None)  # the launcher's own
        environment |= {_OPENMP: "1"} if self.on_cpu else {}
        with self.log.open("ab") as output:
            self.process = self._spawn([*self.command, *extra], output, environment)
        os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self.niceness)

    def _spawn(self, command: list[str], output: IO[bytes], environment: Mapping[str, str]) -> Child:
        """Starts the child in a process group of its own: Ctrl-C in the terminal reaches only the launcher, which stops the
        others in order. Not in a session of its own: Linux compares niceness only within a session."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, process_group=0
        )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def signal(self, number: signal.Signals) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Cluster:
    """Servers and their workers.

    Args:
        servers: The servers' processes, the leader's first; empty if somebody else runs them.
        workers: The workers' processes.
        say: Prints a line for the user.
        resume: Whether to start the servers with --resume.
        ends_together: Whether the run is over for all workers as soon as the server says that it is complete.
        complete: Whether the server said so when it was asked last.
        left_early: Names of worker processes that have ended with status 0, but the server says that the run is not complete.
        diverged: Names of worker processes whose training diverged.
        committed: Whether a commit was made since the start.
        failures: By worker process: the traceback that it last ended with.
        given_up: Names of worker processes that kept failing while others made commits.
    """

    servers: list[Member]
    workers: list[Member]
    say: Callable[[str], None]
    resume: bool = False
    ends_together: bool = False
    complete: bool = False
    left_early: set[str] = field(default_factory=set)
    diverged: list[str] = field(default_factory=list)
    committed: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)

    def start(self, address: str = "") -> None:
        """Starts the servers, and the workers once the leader listens at this address; after some seconds in any case."""
        for server in self.servers:
            server.start(*(["--resume"] if self.resume else []))
        deadline = time.monotonic() + _LISTEN_SECONDS
        while address and self.servers[0].running and not _listens(address) and time.monotonic() < deadline:
            time.sleep(0.02)
        for worker in self.workers:
            worker.start()

    @property
    def done(self) -> set[str]:
        """The names of the worker processes that have ended with status 0."""
        return {worker.name for worker in self.workers if worker.status == 0}

    def supervise(self, healthy: bool, now: float) -> None:
        """Restarts processes that have died: a server at once, a worker that keeps failing after longer and longer pauses.
        Gives such a worker up if the run has commits without it. Once the run is complete, no worker is started again.

        Args:
            healthy: Whether commits were made since the last call.
            now: Monotonic seconds.

        Raises:
            WrongSettings: A server rejects its settings.
            ClusterError: A process keeps dying or has wrong options, all workers fail alike before their first commit, or all
                are given up.
        """
        if healthy:
            self._forgive(now)
        for server in self.servers:
            self._tend_server(server)
        for worker in self.workers:
            if worker.name not in self.given_up:
                self._tend_worker(worker, now)

    def _forgive(self, now: float) -> None:
        """Commits were made: forgets the restarts of the servers, and of the workers that have run for a while. The commits may
        be of other workers than the one that fails."""
        self.committed = True
        for server in self.servers:
            server.restarts = 0
        for worker in self.workers:
            if worker.running and not worker.waiting and now - worker.began >= _STEADY_SECONDS:
                worker.restarts = 0

    def _tend_server(self, server: Member) -> None:
        if server.running:
            return
        if server.status == EXIT_WRONG_USE and not self.committed and not server.restarts:
            raise WrongSettings(_refusal(server.failure_excerpt()))
        ending = _ending(server.status)
        self._count_restart(server, ending)
        self.say(f"{server.name} {ending}; restarting it")
        server.start("--resume")

    def _tend_worker(self, worker: Member, now: float) -> None:
        over = self.ends_together and self.complete
        if worker.due is not None:
            if now >= worker.due and not over:
                worker.due, worker.began = None, now
                worker.start()
            return
        if how := worker.restarted():
            if not self._may_restart(worker, how):
                return
            worker.began = now
            self.say(f"{worker.name} {how}")
        if worker.status == EXIT_DIVERGED and worker.name not in self.diverged:
            self.diverged.append(worker.name)
            self.say(f"{worker.name} diverged: its gradient is no longer finite; lower --learning-rate")
        elif not over and worker.status not in self._ends(worker):
            self._stop_if_all_fail_alike(worker)
            self._restart_worker(worker, now)

    @property
    def finished(self) -> bool:
        """Whether the run is over: every worker process has ended by itself, done or diverged. Those that were given up don't
        count. If the run ends together, the server says whether it is complete; how its workers ended does not matter then, nor
        do those that still wait for a place to run, or for a restart."""
        if self.ends_together and self.complete:
            return not any(worker.running and not worker.waiting for worker in self.workers)
        ends = (EXIT_DIVERGED,) if self.ends_together else (0, EXIT_DIVERGED)
        return all(worker.status in ends or worker.name in self.given_up for worker in self.workers)

    def _ends(self, worker: Member) -> tuple[int | None, ...]:
        """The statuses after which the worker is not started again."""
        return (None, EXIT_DIVERGED) if worker.name in self.left_early else (None, 0, EXIT_DIVERGED)

    def asked(self, state: pb.RunState, done: Collection[str]) -> None:
        """Takes in the run's state, for the next `supervise`. `done` is what `done` was before the server was asked."""
        self.complete = state == pb.RUN_STATE_COMPLETE
        unfinished = self.ends_together and state in (pb.RUN_STATE_WAITING, pb.RUN_STATE_TRAINING)
        self.left_early = set(done) if unfinished else set()

    def stop(self) -> None:
        """Stops the workers, then the servers, which write checkpoints. Leaves no process behind."""
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait(deadline - time.monotonic())
        deadline = time.monotonic() + _STOP_SECONDS
        for server in self.servers:
            server.signal(signal.SIGTERM)
        for server in self.servers:
            server.wait(deadline - time.monotonic())

    def _stop_if_all_fail_alike(self, failed: Member) -> None:
        """Raises ClusterError if every worker failed alike before a commit: a bug in the task, which a restart would hide."""
        failure = users_frames(failed.logged())
        self.failures[failed.name] = failure
        if self.committed or not failure:
            return
        if all(same_failure(self.failures.get(worker.name, ""), failure) for worker in self.workers):
            who = failed.name if len(self.workers) == 1 else "every worker"
            raise ClusterError(f"{who} failed before its first commit:\n{failure}\nfull log: {failed.log}")

    def _restart_worker(self, worker: Member, now: float) -> None:
        """Has a worker started again: at once for the first time, and after a pause from the second time in a row. Always after
        a pause if its task raised before the first commit: the others, which may fail alike, shall not wait for its start."""
        ending = f"{_ending(worker.status)}{'' if worker.status else ', but the run is not complete'}"
        if self._may_restart(worker, ending):
            pause = PAUSES[worker.restarts - 1]
            if self.failures.get(worker.name) and not self.committed:
                pause = max(pause, _OTHERS_SECONDS)
            self.say(f"{worker.name} {ending}; restarting it" + (f" in {pause:g} s" if pause else ""))
            worker.due = now + pause
            self._tend_worker(worker, now)

    def _may_restart(self, worker: Member, ending: str) -> bool:
        """Counts a worker's restart. Gives the worker up, and returns False, if it keeps failing and the run has commits.

        Raises ClusterError if the run has none, or no worker is left."""
        try:
            self._count_restart(worker, ending)
            return True
        except ClusterError as error:
            others = [each for each in self.workers if each is not worker and each.name not in self.given_up]
            if not self.committed or not others:
                raise
            self.given_up.append(worker.name)
            worker.signal(signal.SIGKILL)
            self.say(f"going on without a worker that failed {MAX_RESTARTS + 1} times in a row: {error}")
            return False

    def _count_restart(self, member: Member, ending: str) -> None:
        """Raises ClusterError if another restart can't help."""
        # Once there were commits, a worker's options are right: only its machine may lack something.
        is_server = any(member is server for server in self.servers)
        hopeless = member.status == EXIT_WRONG_USE and (is_server or not self.committed)
        if hopeless or member.restarts >= MAX_RESTARTS:
            raise ClusterError(f"{member.name} {ending}:\n{member.failure_excerpt()}\nfull log: {member.log}")
        member.restarts += 1


def require_rule(hyperparameters: Hyperparameters) -> None:
    """Has the server's code check the rule and its options before a run is begun. Raises WrongSettings."""
    command = python("gem_server.check", *flags(hyperparameters))
    environment = _environment(settings_without_flags(hyperparameters))
    checked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if checked.returncode == EXIT_WRONG_USE:  # whatever else stops it, the server says at its start
        raise WrongSettings(_refusal(checked.stderr))


def ends_together(hyperparameters: Hyperparameters) -> bool:
    """Whether a run with these hyper-parameters is over for all workers as soon as one of them is done."""
    return hyperparameters.shards == "partition" and not hyperparameters.steps


def python(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def spread(workers: int, processes: int) -> list[range]:
    """Splits the workers' numbers evenly over the processes; no process is left without a worker."""
    count = min(processes, workers)
    return [range(workers * process // count, workers * (process + 1) // count) for process in range(count)]


def free_port(host: str = "127.0.0.1") -> int:
    """A port of an address of this machine that is free now."""
    return free_ports([host])[0]


def free_ports(hosts: Iterable[str]) -> list[int]:
    """For each of these addresses of this machine, a port that is free now; all differ."""
    with ExitStack() as probes:
        ports: list[int] = []
        for host in hosts:
            probe = probes.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports.append(probe.getsockname()[1])
        return ports


def require_listener(address: str, seconds: float) -> None:
    """Raises OSError if nothing listens at a "host:port", ValueError if the port is no number."""
    socket.create_connection(host_and_port(address), timeout=seconds).close()


def _listens(address: str) -> bool:
    try:
        require_listener(address, 1.0)
    except OSError:
        return False
    return True


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a process with these settings. The launcher's own GEM_ variables are meant for the launcher alone."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GEM_")} | as_environment(settings)


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _refusal(failure_excerpt: str) -> str:
    """The reason why the server did not start: its last line of output, without the program's name."""
    last = (failure_excerpt.splitlines() or ["the server did not start"])[-1]
    return last.removeprefix("gem-server: ").removeprefix("Error: ")
