"""A cluster: server processes and their workers, restarted if they die. Workers are local processes, or run elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.lifetime import LAUNCHER

from gem_worker.command import EXIT_DIVERGED, EXIT_WRONG_USE
from gem_worker.launcher.tracebacks import same_failure, users_part

WORKER_NICENESS = 10  # with few cores, the server must not wait for a worker that computes
MAX_RESTARTS = 5  # of one process in a row, without a commit in between
_STOP_SECONDS = 20.0


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
        restarts: Restarts since the last commit.
        log_start: Where in `log` the output of the running, or last, process begins, in bytes.
    """

    name: str
    log: Path
    restarts: int = field(default=0, kw_only=True)
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
        """How another program has restarted the process since the last call, as a phrase; None if it has not."""
        return None

    @property
    def running(self) -> bool:
        return self.status is None

    def logged(self) -> str:
        """The log output of the current process."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        """Why the process ended, from its log: the user's part of a traceback, else the last lines."""
        log = self.logged()
        return users_part(log) or "\n".join(log.splitlines()[-5:])

    def _begin_log(self) -> None:
        """The output from here on is that of a new process."""
        self.log_start = self.log.stat().st_size if self.log.exists() else 0


@dataclass
class Process(Member):
    """A member that is a child process of this one.

    Attributes:
        command: Its command line.
        niceness: Added to the launcher's own niceness; higher means lower priority.
        process: The running, or last, process.
    """

    command: list[str]
    niceness: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, *extra: str) -> None:
        # A separate process group: Ctrl-C in the terminal reaches only the launcher, which stops the others in order. Not a
        # separate session: Linux compares niceness only within a session. GEM_ variables are meant for the launcher;
        # the other processes get flags.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GEM_")}
        self._begin_log()
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.command, *extra], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                process_group=0,
            )  # fmt: skip
        os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self.niceness)

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
        servers: The servers' processes, the lead's first; empty if somebody else runs them.
        workers: The workers' processes.
        say: Prints a line for the user.
        resume: Whether to start the servers with --resume.
        ends_together: Whether the run is over for all workers as soon as one is done.
        diverged: Names of worker processes whose training diverged.
        committed: Whether a commit was made since the start.
        failures: By worker process: the traceback that it last ended with.
    """

    servers: list[Member]
    workers: list[Member]
    say: Callable[[str], None]
    resume: bool = False
    ends_together: bool = False
    diverged: list[str] = field(default_factory=list)
    committed: bool = False
    failures: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        for server in self.servers:
            server.start(*(["--resume"] if self.resume else []))
        for worker in self.workers:
            worker.start()

    def tend(self, healthy: bool) -> None:
        """Restarts processes that have died; `healthy` says whether commits were made since the last call.

        Raises:
            WrongSettings: A server rejects its settings.
            ClusterError: A process keeps dying or has wrong options, or all workers fail alike before their first commit.
        """
        if healthy:
            self.committed = True
            for member in (*self.servers, *self.workers):
                member.restarts = 0
        for server in self.servers:
            self._tend_server(server)
        for worker in self.workers:
            self._tend_worker(worker)

    def _tend_server(self, server: Member) -> None:
        if server.running:
            return
        if server.status == EXIT_WRONG_USE and not self.committed and not server.restarts:
            raise WrongSettings(_refusal(server.last_words()))
        self._restart(server, "--resume")

    def _tend_worker(self, worker: Member) -> None:
        if how := worker.restarted():
            self._count_restart(worker, how)
            self.say(f"{worker.name} {how}")
        if worker.status == EXIT_DIVERGED and worker.name not in self.diverged:
            self.diverged.append(worker.name)
            self.say(f"{worker.name} diverged: its gradient is no longer finite")
        elif worker.status not in (None, 0, EXIT_DIVERGED):
            self._stop_if_all_fail_alike(worker)
            self._restart(worker)

    @property
    def finished(self) -> bool:
        """Whether every worker process has ended by itself, done or diverged. If the run is over, those that still wait for a
        place to run don't count."""
        over = self.ends_together and any(worker.status == 0 for worker in self.workers)
        return all(worker.status in (0, EXIT_DIVERGED) or (over and worker.waiting) for worker in self.workers)

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
        failure = users_part(failed.logged())
        self.failures[failed.name] = failure
        if self.committed or not failure:
            return
        if all(same_failure(self.failures.get(worker.name, ""), failure) for worker in self.workers):
            who = failed.name if len(self.workers) == 1 else "every worker"
            raise ClusterError(f"{who} failed before its first commit:\n{failure}\nfull log: {failed.log}")

    def _restart(self, member: Member, *extra: str) -> None:
        ending = _ending(member.status)
        self._count_restart(member, ending)
        self.say(f"{member.name} {ending}; restarting it")
        member.start(*extra)

    def _count_restart(self, member: Member, ending: str) -> None:
        """Raises ClusterError if another restart can't help."""
        # Once there were commits, a worker's options are right: only its machine may lack something.
        is_server = any(member is server for server in self.servers)
        hopeless = member.status == EXIT_WRONG_USE and (is_server or not self.committed)
        if hopeless or member.restarts >= MAX_RESTARTS:
            raise ClusterError(f"{member.name} {ending}:\n{member.last_words()}\nfull log: {member.log}")
        member.restarts += 1


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


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _refusal(last_words: str) -> str:
    """Why the server did not start: its last line of output, without the program's name."""
    return (last_words.splitlines() or ["the server did not start"])[-1].removeprefix("gem-server: ").removeprefix("Error: ")
