"""Real processes: a server that is restarted on the same port whenever it dies, and workers that return too."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos.proxy import HOST, Proxy
from chaos.worker import Kind, Orders
from live import wait_until

DEADLINE = 120.0  # seconds that progress may take on a slow machine
_WORKER = Path(__file__).with_name("worker.py")


def quiet_port() -> int:
    """A free port that the system gives to no outgoing connection, so that no process takes it while the server is down."""
    for port in random.sample(range(20_000, 30_000), 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 30000")


@dataclass
class WorkerProcess:
    """A running worker process, and its settings."""

    process: subprocess.Popen[bytes]
    name: str
    kind: Kind


@dataclass
class Diaries:
    """The workers' records, as far as they were read."""

    folder: Path
    read: dict[Path, int] = field(default_factory=dict)
    acknowledged: int = 0

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.jsonl"))

    def transports(self) -> dict[str, int]:
        """Number of acknowledged commits by the way they took: memory, tcp, grpc."""
        acknowledged = b"".join(path.read_bytes() for path in self.paths())
        return {via: found for via in ("memory", "tcp", "grpc") if (found := acknowledged.count(b'"via": "%s"' % via.encode()))}

    def count(self) -> int:
        """Number of acknowledged commits so far."""
        for path in self.paths():
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self.acknowledged += whole.count(b'"event": "ack"')
            self.read[path] = self.read.get(path, 0) + len(whole)
        return self.acknowledged


class Cluster:
    """One server and its workers. Their folder holds `checkpoints`, `diaries` and the output of the processes.

    Args:
        folder: A new one.
        seed: What gradients and faults are drawn from.
        parameters: Size of the model.
        kinds: Its workers.
        checkpoints: Where the server's checkpoints and log go; in the folder by default.
        checkpoint_interval: Seconds between two of them; 0 for none.
        bytes_between_faults: Of the proxy.

    Attributes:
        diaries: What the workers wrote down.
        proxy, lane_proxy: Between the workers and the server's two ports.
        starts: How often the server was started.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        parameters: int,
        kinds: list[Kind],
        *,
        checkpoints: Path | None = None,
        checkpoint_interval: float = 2.0,
        bytes_between_faults: int,
    ) -> None:
        self._folder = folder
        self.checkpoints = checkpoints or folder / "checkpoints"
        self._interval = checkpoint_interval
        self._parameters = parameters
        self._stop = folder / "stop"
        self._numbers, self._seeds = itertools.count(1), itertools.count(seed * 1_000_000)
        self.diaries = Diaries(folder / "diaries")
        self.diaries.folder.mkdir(parents=True)
        self.port, self.lane_port, self.metrics_port = quiet_port(), quiet_port(), quiet_port()
        self.proxy = Proxy(self.port, seed, bytes_between_faults)
        self.lane_proxy = Proxy(self.lane_port, seed, bytes_between_faults, self.lane_port)
        self.starts = 0
        self._server: subprocess.Popen[bytes] | None = None
        self.workers: list[WorkerProcess] = []
        self.start_server()
        for kind in kinds:
            self._start_worker(f"worker-{next(self._numbers)}", kind)

    # -- the server

    @property
    def server(self) -> subprocess.Popen[bytes]:
        assert self._server is not None
        return self._server

    @property
    def server_log(self) -> Path:
        """The file with the output of the current server process."""
        return self._folder / f"server-{self.starts:03d}.log"

    def start_server(self) -> None:
        self.starts += 1
        options = [
            f"--listen=127.0.0.1:{self.port}", f"--lane-listen=127.0.0.1:{self.lane_port}",
            f"--metrics-listen=127.0.0.1:{self.metrics_port}",
            f"--checkpoint-dir={self.checkpoints}", "--resume", "--durability=log", "--checkpoint-keep=1000000",
            f"--checkpoint-interval={self._interval}", "--lease-seconds=5", "--epochs=1000000", "--shard-size=128",
        ]  # fmt: skip
        with self.server_log.open("wb") as log:
            self._server = subprocess.Popen([sys.executable, "-m", "gem_server", *options], stdout=log, stderr=log)

    def wait_server(self, line: str) -> None:
        """Waits until the current server process has printed a text."""
        wait_until(lambda: self.says(line) or self.server.poll() is not None, f"server: {line}", DEADLINE)
        assert self.says(line), f"the server ended before it said {line!r}: {self.server_log.read_text()}"

    def says(self, line: str) -> bool:
        return line.encode() in self.server_log.read_bytes()

    def kill_server(self) -> None:
        self.server.kill()
        self.server.wait()

    # -- the workers

    def _start_worker(self, name: str, kind: Kind) -> None:
        number = next(self._seeds)
        address = f"{HOST}:{self.proxy.port}" if kind.proxied else f"127.0.0.1:{self.port}"
        told = Orders(
            address, name, str(self.diaries.folder / f"{name}-{number}.jsonl"), str(self._stop),
            self._parameters, number, kind,
        )  # fmt: skip
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, str(_WORKER), told.text()], stdout=log, stderr=log)
        self.workers.append(WorkerProcess(process, name, kind))

    def kill_worker(self, which: int, renamed: bool) -> None:
        """Kills a worker and starts another with the same settings at once, under the same name or a new one."""
        worker = self.workers.pop(which)
        assert worker.process.poll() is None, self._ended_by_itself(worker)
        worker.process.kill()
        worker.process.wait()
        self._start_worker(f"worker-{next(self._numbers)}" if renamed else worker.name, worker.kind)

    def _ended_by_itself(self, worker: WorkerProcess) -> str:
        log = (self._folder / f"{worker.name}.log").read_text()
        return f"{worker.name} ({worker.kind}) ended by itself, status {worker.process.returncode}: {log}"

    # -- progress

    def wait_acknowledged(self, more: int) -> float:
        """Waits until workers got this number of further acknowledgements. Returns the seconds that it took."""
        began, due = time.monotonic(), self.diaries.count() + more

        def reached() -> bool:
            for worker in self.workers:
                assert worker.process.poll() is None, self._ended_by_itself(worker)
            assert self.server.poll() is None, f"the server ended by itself: {self.server_log.read_text()}"
            return self.diaries.count() >= due

        wait_until(reached, f"{more} more acknowledged commits", DEADLINE)
        return time.monotonic() - began

    def finish(self) -> None:
        """Stops the workers, then the server, gracefully."""
        self._stop.touch()
        for worker in self.workers:
            assert worker.process.wait(DEADLINE) == 0, self._ended_by_itself(worker)
        self.server.send_signal(signal.SIGTERM)
        assert self.server.wait(DEADLINE) == 0, self.server_log.read_text()

    def close(self) -> None:
        """Kills all remaining processes."""
        for process in [worker.process for worker in self.workers] + [self.server]:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.proxy.close()
        self.lane_proxy.close()
