"""Real processes: servers that are restarted on the same ports whenever they die, and workers that return too."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import gem_client
from chaos.server_process import DEADLINE, ServerProcess
from chaos.worker import Kind, Orders
from gem_api.ranges import Range
from kit.server import wait_until

_WORKER = Path(__file__).with_name("worker.py")


@dataclass
class WorkerProcess:
    """A running worker process, its settings and its diary."""

    process: subprocess.Popen[bytes]
    name: str
    kind: Kind
    diary: Path


@dataclass
class Diaries:
    """The workers' records, as far as they were read."""

    folder: Path
    read: dict[Path, int] = field(default_factory=dict)
    acknowledged: int = 0
    shards_completed: int = 0

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.jsonl"))

    def transports(self) -> dict[str, int]:
        """Number of acknowledged commits, or parts of commits, by the way they took: memory, tcp, grpc."""
        acknowledged = b"".join(path.read_bytes() for path in self.paths())
        return {via: found for via in ("memory", "tcp", "grpc") if (found := acknowledged.count(b'"via": "%s"' % via.encode()))}

    def count(self) -> int:
        """Number of commits so far that all servers have acknowledged."""
        for path in self.paths():
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self.acknowledged += whole.count(b'"event": "committed"')
            self.shards_completed += whole.count(b'"event": "completed"')
            self.read[path] = self.read.get(path, 0) + len(whole)
        return self.acknowledged


class Cluster:
    """Servers and their workers. Their folder holds `checkpoints`, `diaries` and the output of the processes.

    Args:
        folder: A new one.
        seed: What gradients and faults are drawn from.
        parameters: Size of the model.
        kinds: Its workers.
        servers: Number of servers; each holds a range of θ if there are several.
        checkpoints: Where the checkpoints and the log go; in the folder by default. With several servers, each has a folder in
            there.
        optimizer: The one that the servers keep: "sgd" or "adamw".
        in_step: Whether replies wait for other workers' commits, and slow workers get smaller batches.
        checkpoint_interval: Seconds between two of them; 0 for none.
        bytes_between_faults: Of the proxies.

    Attributes:
        diaries: What the workers wrote down.
        servers: In the order of their ranges.
        workers: Those that run.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        parameters: int,
        kinds: list[Kind],
        *,
        servers: int = 1,
        checkpoints: Path | None = None,
        optimizer: str = "sgd",
        in_step: bool = False,
        checkpoint_interval: float = 2.0,
        bytes_between_faults: int,
    ) -> None:
        self._folder = folder
        self._parameters = parameters
        self._stop = folder / "stop"
        self._numbers, self._seeds = itertools.count(1), itertools.count(seed * 1_000_000)
        self.diaries = Diaries(folder / "diaries")
        self.diaries.folder.mkdir(parents=True)
        home = checkpoints or folder / "checkpoints"
        self.servers = [
            ServerProcess(
                folder, home if servers == 1 else home / f"range-{index}", Range(index, servers), seed + 1000 * index,
                optimizer, in_step, checkpoint_interval, bytes_between_faults,
            )
            for index in range(servers)
        ]  # fmt: skip
        self.leader.peers = [server.proxied_address for server in self.servers[1:]]
        self.workers: list[WorkerProcess] = []
        for server in self.servers:
            server.start()
        for kind in kinds:
            self._start_worker(f"worker-{next(self._numbers)}", kind)

    @property
    def leader(self) -> ServerProcess:
        """The server that workers connect to."""
        return self.servers[0]

    # -- the workers

    def _start_worker(self, name: str, kind: Kind) -> None:
        number = next(self._seeds)
        address = self.leader.proxied_address if kind.proxied else self.leader.address
        diary = self.diaries.folder / f"{name}-{number}.jsonl"
        told = Orders(address, name, str(diary), str(self._stop), self._parameters, number, kind)
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, str(_WORKER), told.text()], stdout=log, stderr=log)
        self.workers.append(WorkerProcess(process, name, kind, diary))

    def kill_worker(self, which: int, renamed: bool) -> None:
        """Kills a worker and starts another with the same settings at once, under the same name or a new one."""
        worker = self.workers.pop(which)
        assert worker.process.poll() is None, self._ended_by_itself(worker)
        worker.process.kill()
        worker.process.wait()
        self._start_worker(f"worker-{next(self._numbers)}" if renamed else worker.name, worker.kind)

    @contextmanager
    def suspended(self, which: int) -> Iterator[WorkerProcess]:
        """Suspends a worker during a `with` block."""
        worker = self.workers[which]
        assert worker.process.poll() is None, self._ended_by_itself(worker)
        worker.process.send_signal(signal.SIGSTOP)
        try:
            yield worker
        finally:
            worker.process.send_signal(signal.SIGCONT)

    @staticmethod
    def wait_expired(worker: WorkerProcess, servers: list[ServerProcess]) -> None:
        """Waits until servers, which go on running, have ended the lease of a worker that is suspended now."""
        before = {server.log: _expirations(server.log, worker.name) for server in servers}
        wait_until(
            lambda: all(_expirations(log, worker.name) > count for log, count in before.items()),
            f"the lease of {worker.name} expires", DEADLINE,
        )  # fmt: skip

    def _ended_by_itself(self, worker: WorkerProcess) -> str:
        log = (self._folder / f"{worker.name}.log").read_text()
        return f"{worker.name} ({worker.kind}) ended by itself, status {worker.process.returncode}: {log}"

    # -- progress

    def wait_acknowledged(self, more: int) -> float:
        """Waits until workers got this number of further acknowledgements. Returns the seconds that it took."""
        began, due = time.monotonic(), self.diaries.count() + more
        self._wait(lambda: self.diaries.count() >= due, f"{more} more acknowledged commits")
        return time.monotonic() - began

    def wait_all_acknowledged(self) -> None:
        """Waits until each worker has had a commit acknowledged."""
        diaries = [worker.diary for worker in self.workers]
        self._wait(lambda: all(map(_has_committed, diaries)), "an acknowledged commit of each worker")

    def wait_shard_completed(self) -> None:
        """Waits until a worker has completed a shard, if one works on shards."""
        if any(worker.kind.shards for worker in self.workers):
            self._wait(lambda: bool(self.diaries.count() and self.diaries.shards_completed), "a completed shard")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition while all processes live."""

        def reached() -> bool:
            for worker in self.workers:
                assert worker.process.poll() is None, self._ended_by_itself(worker)
            for server in self.servers:
                server.require_alive()
            return condition()

        wait_until(reached, what, DEADLINE)

    def finish(self) -> list[int]:
        """Stops the workers, waits until their leases have ended, then stops the servers, gracefully. Returns the servers'
        versions at rest, as they say themselves."""
        self._stop.touch()
        for worker in self.workers:
            assert worker.process.wait(DEADLINE) == 0, self._ended_by_itself(worker)
        versions = [_version_at_rest(server) for server in self.servers]
        for server in self.servers:
            server.drain()
        for server in self.servers:
            server.wait_drained()
        return versions

    def close(self) -> None:
        """Kills all remaining processes."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
        for server in self.servers:
            server.close()


def _has_committed(diary: Path) -> bool:
    return diary.exists() and b'"event": "committed"' in diary.read_bytes()


def _version_at_rest(server: ServerProcess) -> int:
    """The version of a server's θ, once it has no worker left."""
    with gem_client.Admin(server.address) as admin:
        wait_until(partial(_has_no_workers, admin), f"server {server.part} has no worker left", DEADLINE)
        return admin.status().version


def _expirations(log: Path, worker: str) -> int:
    """How many leases of a worker have expired, as a server's output tells."""
    lines = log.read_text().splitlines()
    return sum("lease ended" in line and "reason=expired" in line and f"worker={worker} " in line for line in lines)


def _has_no_workers(admin: gem_client.Admin) -> bool:
    return not admin.status().workers
