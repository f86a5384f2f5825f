"""A Ray cluster of several nodes on this machine, and gem-train on it as a process."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from gem_client import Admin
from kit.server import wait_until
from launcher.train_helpers import PATIENCE, Launcher, command_lines


@contextmanager
def ray_cluster(cpus: int, *, token: bool = False, joined: bool = False, **resources: float) -> Iterator[RayCluster]:
    """A cluster with a head. This process, and those that it starts, have the environment for it; with `joined`, it is
    connected. The rest are arguments of `RayCluster`."""
    cluster = RayCluster(token)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        try:
            cluster.start_head(cpus, **resources)
            if joined:
                import ray  # not before the environment is set

                ray.init(cluster.address, log_to_driver=False)
            yield cluster
        finally:
            if joined:
                ray.shutdown()
            cluster.close()


class RayCluster:
    """Nodes started with `ray start`, each with an address of its own.

    Args:
        token: Whether the cluster asks for a token. A process that has imported Ray before can't give one any more.

    Attributes:
        address: "host:port" of the cluster.
        environment: Environment variables with which another process can connect.
    """

    def __init__(self, token: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-gem-", dir="/tmp"))  # short: Ray puts sockets there
        self.address = ""
        self.environment = {
            **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if token else {"RAY_AUTH_MODE": "disabled"}),
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def start_head(self, cpus: int, **resources: float) -> None:
        said = self._ray_start("--head", "--port=0", f"--temp-dir={self._folder}", "--include-dashboard=false",
                               f"--num-cpus={cpus}", f"--resources={json.dumps(resources)}")  # fmt: skip
        found = re.search(r"ray start --address='(\S+)'", said)
        assert found, said
        self.address = found[1]

    @property
    def head(self) -> str:
        """The head's host."""
        return self.address.rpartition(":")[0]

    def add_node(self, host: str, cpus: int, labels: str = "") -> None:
        self._ray_start(f"--address={self.address}", f"--node-ip-address={host}", f"--num-cpus={cpus}", f"--labels={labels}")

    def actors(self, host: str) -> list[int]:
        """The process ids of a node's workers, those of the actors among them."""
        return [pid for pid, title in command_lines() if title.startswith("ray::Worker") and _parent(pid) == self._raylet(host)]

    def stop_node(self, host: str) -> None:
        """Kills a node: its Ray daemon and all its workers at once, as if the machine had lost power."""
        raylet = self._raylet(host)
        for pid in [raylet, *(pid for pid, _ in command_lines() if _parent(pid) == raylet)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Leaves no process and no file behind."""

        def gone() -> bool:
            ours = [pid for pid, command in command_lines() if str(self._folder) in command or _parent(pid) in raylets]
            for pid in ours:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not ours

        raylets = [pid for pid, command in command_lines() if "/raylet " in command and str(self._folder) in command]
        wait_until(gone, "Ray's processes to end", PATIENCE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ray_start(self, *flags: str) -> str:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats", *flags]
        if "--head" not in flags:
            command.remove("--disable-usage-stats")
        done = subprocess.run(command, env=os.environ | self.environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def _raylet(self, host: str) -> int:
        (pid,) = [
            pid
            for pid, command in command_lines()
            if "/raylet " in command and str(self._folder) in command and f"--node_ip_address={host} " in command
        ]
        return pid


class OnRay(Launcher):
    """A running `gem-train --on ray`."""

    @property
    def address(self) -> str:
        return self.until_it_says(r"server (\S+:\d+),")

    def admin(self) -> Admin:
        """A connection to the run's server, as an admin."""
        address = self.address
        return Admin(address, timeout=5.0, token=(self.folder / "admin-token").read_text().strip())


def _parent(pid: int) -> int:
    """The process id of a process's parent; 0 if it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
