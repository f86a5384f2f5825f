"""A cluster on this machine: a server process and worker processes, restarted if they die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gem_api.process.lifetime import LAUNCHER

from gem_worker.command import EXIT_DIVERGED, EXIT_WRONG_USE
from gem_worker.launcher.tracebacks import same_failure, users_part

WORKER_NICENESS = 10  # with few cores, the server must not wait for a worker that computes
MAX_RESTARTS = 5  # of one process in a row, without a commit in between
_STOP_SECONDS = 20.0


class ClusterError(Exception):
    """The cluster can't continue; the message says why and where to look."""


class WrongSettings(ClusterError):
    """The server rejected its settings at the start; the message is the server's."""


@dataclass
class Member:
    """One process of the cluster.

    Attributes:
        name: The process's name in messages.
        command: Its command line.
        log: The file that its output is appended to.
        niceness: Added to the launcher's own niceness; higher means lower priority.
        process: The running, or last, process.
        restarts: Restarts since the last commit.
        log_start: Where in `log` the output of `process` begins, in bytes.
    """

    name: str
    command: list[str]
    log: Path
    niceness: int = 0
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    log_start: int = 0

    def start(self, *extra: str) -> None:
        # A separate process group: Ctrl-C in the terminal reaches only the launcher, which stops the others in order. Not a
        # separate session: Linux compares niceness only within a session. GEM_ variables are meant for the launcher;
        # the other processes get flags.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GEM_")}
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
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
        """Exit status, negative if a signal ended it; None while it runs."""
        return self.process.poll() if self.process is not None else None

    def signal(self, number: signal.Signals) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Waits for the process to end; kills it after `seconds`."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def logged(self) -> str:
        """The log output of the current process."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        """Why the process ended, from its log: the user's part of a traceback, else the last lines."""
        log = self.logged()
        return users_part(log) or "\n".join(log.splitlines()[-5:])


@dataclass
class Cluster:
    """A server and its workers.

    Args:
        server: The server's process.
        workers: The workers' processes.
        say: Prints a line for the user.
        resume: Whether to start the server with --resume.
        diverged: Names of worker processes whose training diverged.
        committed: Whether a commit was made since the start.
        failures: By worker process: the traceback that it last ended with.
    """

    server: Member
    workers: list[Member]
    say: Callable[[str], None]
    resume: bool = False
    diverged: list[str] = field(default_factory=list)
    committed: bool = False
    failures: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        self.server.start(*(["--resume"] if self.resume else []))
        for worker in self.workers:
            worker.start()

    def tend(self, healthy: bool) -> None:
        """Restarts processes that have died; `healthy` says whether commits were made since the last call.

        Raises:
            WrongSettings: The server rejects its settings.
            ClusterError: A process keeps dying or has wrong options, or all workers fail alike before their first commit.
        """
        if healthy:
            self.committed = True
            for member in (self.server, *self.workers):
                member.restarts = 0
        self._tend_server()
        for worker in self.workers:
            self._tend_worker(worker)

    def _tend_server(self) -> None:
        if self.server.running:
            return
        if self.server.status == EXIT_WRONG_USE and not self.committed and not self.server.restarts:
            raise WrongSettings(_refusal(self.server.last_words()))
        self._restart(self.server, "--resume")

    def _tend_worker(self, worker: Member) -> None:
        if worker.status == EXIT_DIVERGED and worker.name not in self.diverged:
            self.diverged.append(worker.name)
            self.say(f"{worker.name} diverged: its gradient is no longer finite")
        elif worker.status not in (None, 0, EXIT_DIVERGED):
            self._stop_if_all_fail_alike(worker)
            self._restart(worker)

    @property
    def finished(self) -> bool:
        """Whether every worker process has ended by itself, done or diverged."""
        return all(worker.status in (0, EXIT_DIVERGED) for worker in self.workers)

    def stop(self) -> None:
        """Stops the workers, then the server, which writes a checkpoint. Leaves no process behind."""
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait(deadline - time.monotonic())
        self.server.signal(signal.SIGTERM)
        self.server.wait(_STOP_SECONDS)

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
        if member.status == EXIT_WRONG_USE or member.restarts >= MAX_RESTARTS:
            raise ClusterError(f"{member.name} {ending}:\n{member.last_words()}\nfull log: {member.log}")
        member.restarts += 1
        self.say(f"{member.name} {ending}; restarting it")
        member.start(*extra)


def python(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def spread(workers: int, processes: int) -> list[range]:
    """Splits the workers' numbers evenly over the processes; no process is left without a worker."""
    count = min(processes, workers)
    return [range(workers * process // count, workers * (process + 1) // count) for process in range(count)]


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _refusal(last_words: str) -> str:
    """Why the server did not start: its last line of output, without the program's name."""
    return (last_words.splitlines() or ["the server did not start"])[-1].removeprefix("gem-server: ").removeprefix("Error: ")
