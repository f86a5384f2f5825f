"""A whole cluster on this machine: a server process and worker processes, started again when they die."""

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

WORKER_NICENESS = 10  # where cores are few, a worker that computes makes way for the server that the others wait for
MAX_RESTARTS = 5  # in a row, of one process, without a commit in between
_STOP_SECONDS = 20.0


class ClusterError(Exception):
    """The cluster can't go on; the message says why and where to look."""


class WrongSettings(ClusterError):
    """The server refused to start with these settings; the message is its own."""


@dataclass
class Member:
    """One process of the cluster, its log appended to a file; `niceness` is how far it stands back for the others."""

    name: str
    command: list[str]
    log: Path
    niceness: int = 0
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    log_start: int = 0  # where in the log the present process began

    def start(self, *extra: str) -> None:
        # A process group of its own: Ctrl-C in the terminal reaches the launcher alone, which stops the others in order. Not a
        # session of its own: Linux weighs processes by their niceness only against others of the same session. The
        # launcher's GEM_ variables are its own; what the others need is in their flags.
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
        """Exit status; negative for a signal; None while it runs."""
        return self.process.poll() if self.process is not None else None

    def signal(self, number: signal.Signals) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Waits for its end; kills it after that time."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def logged(self) -> str:
        """What the present process has logged."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        """What its log says of its end: the user's part of a traceback, else the last lines."""
        log = self.logged()
        return users_part(log) or "\n".join(log.splitlines()[-5:])


@dataclass
class Cluster:
    """A server and its workers.

    Args:
        server: The server's process.
        workers: The workers' processes.
        say: Prints a line for the user.
    """

    server: Member
    workers: list[Member]
    say: Callable[[str], None]
    resume: bool = False
    diverged: list[str] = field(default_factory=list)
    committed: bool = False  # since the start
    failures: dict[str, str] = field(default_factory=dict)  # by worker: the traceback that it last ended with

    def start(self) -> None:
        self.server.start(*(["--resume"] if self.resume else []))
        for worker in self.workers:
            worker.start()

    def tend(self, healthy: bool) -> None:
        """Starts again what has died; `healthy` says that commits were made since the last call.

        Raises:
            WrongSettings: The server refuses its settings.
            ClusterError: A process dies again and again, or was started wrongly; or all workers fail alike at once.
        """
        if healthy:
            self.committed = True
            for member in (self.server, *self.workers):
                member.restarts = 0
        if not self.server.running:
            if self.server.status == EXIT_WRONG_USE and not self.committed and not self.server.restarts:
                raise WrongSettings(_refusal(self.server.last_words()))
            self._restart(self.server, "--resume")
        for worker in self.workers:
            if worker.status == EXIT_DIVERGED and worker.name not in self.diverged:
                self.diverged.append(worker.name)
                self.say(f"{worker.name} diverged: its gradient is no longer finite")
            elif worker.status not in (None, 0, EXIT_DIVERGED):
                self._stop_if_all_fail_alike(worker)
                self._restart(worker)

    @property
    def finished(self) -> bool:
        """Whether every worker has ended of its own accord."""
        return all(worker.status in (0, EXIT_DIVERGED) for worker in self.workers)

    def stop(self) -> None:
        """Ends the workers, then the server, which writes a checkpoint. Leaves no process behind."""
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait(deadline - time.monotonic())
        self.server.signal(signal.SIGTERM)
        self.server.wait(_STOP_SECONDS)

    def _stop_if_all_fail_alike(self, failed: Member) -> None:
        """A task with a bug fails in every worker: to start them again would only hide that. Raises ClusterError."""
        failure = users_part(failed.logged())
        self.failures[failed.name] = failure
        if self.committed or not failure:
            return
        if all(same_failure(self.failures.get(worker.name, ""), failure) for worker in self.workers):
            who = failed.name if len(self.workers) == 1 else "every worker"
            raise ClusterError(f"{who} failed before its first commit:\n{failure}\nthe whole log: {failed.log}")

    def _restart(self, member: Member, *extra: str) -> None:
        ending = _ending(member.status)
        if member.status == EXIT_WRONG_USE or member.restarts >= MAX_RESTARTS:
            raise ClusterError(f"{member.name} {ending}:\n{member.last_words()}\nthe whole log: {member.log}")
        member.restarts += 1
        self.say(f"{member.name} {ending}; starting it again")
        member.start(*extra)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def spread(workers: int, processes: int) -> list[range]:
    """The numbers of the workers in each of so many processes, as evenly as can be; no process without a worker."""
    count = min(processes, workers)
    return [range(workers * process // count, workers * (process + 1) // count) for process in range(count)]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _refusal(last_words: str) -> str:
    """The reason that a command gave for not starting, its last line, without who says so."""
    return (last_words.splitlines() or ["the server refused to start"])[-1].removeprefix("gem-server: ").removeprefix("Error: ")
