"""A real server process that is started again on the same ports whenever it dies, behind its proxies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.proxy import HOST, Proxy
from gem_api.ranges import WHOLE, Range
from kit.ports import free_port
from kit.server import wait_until
from kit.settings import configured

DEADLINE = 120.0  # seconds that progress may take on a slow machine


class ServerProcess:
    """One gem-server with a log. It does not run before `start`.

    Args:
        folder: Where its output goes.
        checkpoints: Where its checkpoints and its log go.
        part: The part of θ that it holds.
        seed: What the faults of its proxies are drawn from.
        optimizer: The one that the server keeps: "sgd" or "adamw".
        in_step: Whether replies wait for other workers' commits, and slow workers get smaller batches.
        checkpoint_interval: Seconds between two checkpoints; 0 for none.
        bytes_between_faults: Of the proxies.

    Attributes:
        port, lane_port, metrics_port: Where it listens.
        proxy, lane_proxy: Between the workers and its first two ports.
        peers: The addresses of the other ranges' servers, if it leads.
        starts: How often it was started.
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: Path,
        part: Range,
        seed: int,
        optimizer: str,
        in_step: bool,
        checkpoint_interval: float,
        bytes_between_faults: int,
    ) -> None:
        self._folder = folder
        self.checkpoints = checkpoints
        self.part = part
        self._optimizer, self._interval = optimizer, checkpoint_interval
        self._in_step = {"smallest_share": 1 / 16, "reply_wait": 0.5} if in_step else {"smallest_share": 1, "reply_wait": 0}
        self.port, self.lane_port, self.metrics_port = free_port(), free_port(), free_port()
        self.proxy = Proxy(self.port, seed, bytes_between_faults)
        self.lane_proxy = Proxy(self.lane_port, seed, bytes_between_faults, self.lane_port)
        self.peers: Sequence[str] = ()
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens itself."""
        return f"127.0.0.1:{self.port}"

    @property
    def proxied_address(self) -> str:
        return f"{HOST}:{self.proxy.port}"

    @property
    def faults(self) -> Counter[str]:
        """How many faults its proxies have caused, by kind."""
        return self.proxy.faults + self.lane_proxy.faults

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> Path:
        """The file with the output of the current process."""
        name = "server" if self.part.whole else f"server-{self.part.index}"
        return self._folder / f"{name}-{self.starts:03d}.log"

    def start(self) -> None:
        self.starts += 1
        options = [
            f"--listen={self.address}", f"--metrics-listen=127.0.0.1:{self.metrics_port}",
            f"--checkpoint-dir={self.checkpoints}", "--resume", "--durability=log", "--epochs=1000000",
            f"--optimizer={self._optimizer}",
            configured(
                lane_listen=f"127.0.0.1:{self.lane_port}", checkpoint_keep=1_000_000, checkpoint_interval=self._interval,
                lease_seconds=5, shard_size=128, **self._in_step,
            ),
        ]  # fmt: skip
        if self.part != WHOLE:
            options.append(f"--range={self.part}")
        if self.peers:
            options.append(f"--peers={','.join(self.peers)}")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "gem_server", *options], stdout=log, stderr=log)

    def wait(self, line: str) -> None:
        """Waits until the current process has printed a text."""
        wait_until(lambda: self.says(line) or self.process.poll() is not None, f"server {self.part}: {line}", DEADLINE)
        assert self.says(line), f"server {self.part} ended before it said {line!r}: {self.log.read_text()}"

    def says(self, line: str) -> bool:
        return line.encode() in self.log.read_bytes()

    def require_alive(self) -> None:
        assert self.process.poll() is None, f"server {self.part} ended by itself: {self.log.read_text()}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def drain(self) -> None:
        """Asks it to end gracefully; `wait_drained` waits for that."""
        self.process.send_signal(signal.SIGTERM)

    def wait_drained(self) -> None:
        assert self.process.wait(DEADLINE) == 0, self.log.read_text()

    def close(self) -> None:
        """Kills the process if it runs, and ends the proxies."""
        if self._process is not None:
            self.kill()
        self.proxy.close()
        self.lane_proxy.close()
