"""A compose project from the repository's docker-compose.yml, with its own name and ports."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVICES = ("server", "worker", "evaluator", "prometheus")  # Grafana is left out: it needs nothing that is ours but files
# Kills everything in a container but the first process, which then ends as a crash would have it end.
_KILL = "import os; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"


class Project:
    """Runs `docker compose` on one project.

    Args:
        run: The run's settings, besides those of deploy/run.toml.
        settings: Variables for the compose file.
    """

    def __init__(self, run: dict[str, Any] | None = None, **settings: str) -> None:
        self.name = f"gemtest{secrets.token_hex(4)}"
        self._run = run or {}
        self._settings = tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8")  # noqa: SIM115 - as long as the project
        self._write_settings()
        os.chmod(self._settings.name, 0o644)  # the containers' user reads it
        ports = {"GEM_SERVER_PORT": "", "GEM_LANE_PORT": "", "GEM_PAGE_PORT": "", "GEM_PROMETHEUS_PORT": ""}  # any free ones
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GEM_")}
        self._environment = clean | ports | {"GEM_CONFIG": self._settings.name} | settings

    def _write_settings(self) -> None:
        """Into the same file: containers see its content, not another one under its name."""
        self._settings.seek(0)
        self._settings.truncate()
        self._settings.writelines(f"{name} = {value!r}\n" for name, value in self._run.items())
        self._settings.flush()

    def hurry(self) -> None:
        """From now on the workers' steps take no longer than they must: a test's slow run comes to its end."""
        self._run = self._run | {"step_seconds": 0.0}
        self._write_settings()
        self.run("restart", "worker")

    def run(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        """`docker compose ARGUMENTS`; returns what it printed on standard output."""
        # An empty file in the place of a .env that the developer may have.
        command = ["docker", "compose", "--project-name", self.name, "--env-file", os.devnull, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}\n{self.logs()}"
            )
        return done.stdout

    def up(self, workers: int, *more: str) -> None:
        self.run("up", "--detach", "--scale", f"worker={workers}", *more, *SERVICES)

    def scale(self, workers: int) -> None:
        self.run("up", "--detach", "--no-recreate", "--scale", f"worker={workers}", *SERVICES)

    def down(self) -> None:
        """Removes everything, volumes too."""
        self.run("down", "--volumes", "--timeout", "10", "--remove-orphans", check=False)
        self._settings.close()

    def containers(self, service: str) -> list[dict[str, Any]]:
        """The output of `docker inspect` for the service's containers."""
        names = self.run("ps", "--all", "--quiet", service).split()
        inspected: list[dict[str, Any]] = json.loads(subprocess.check_output(["docker", "inspect", *names])) if names else []
        return inspected

    def states(self, service: str) -> list[tuple[str, int]]:
        """State and exit code of each container of a service."""
        return [(one["State"]["Status"], one["State"]["ExitCode"]) for one in self.containers(service)]

    def shell(self, service: str, *command: str, index: int = 1, check: bool = True) -> str:
        return self.run("exec", "--no-TTY", "--index", str(index), service, *command, check=check)

    def crash(self, service: str, index: int = 1) -> None:
        """Kills a container's processes with SIGKILL, from inside: its restart policy sees a crash."""
        self.shell(service, "python3", "-c", _KILL, index=index, check=False)

    def status(self, service: str = "server") -> dict[str, Any]:
        """`gem-ctl status --json` in a server's container; empty while the server does not respond."""
        text = self.run("exec", "--no-TTY", service, "gem-ctl", "status", "--json", check=False)
        answer: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
        return answer

    def evaluated(self, version: int) -> dict[str, Any]:
        """The status, once the evaluator has reported this version."""

        def reported() -> dict[str, Any] | None:
            status = self.status()
            return status if (status.get("evaluation") or {}).get("version") == version else None

        return dict(wait_until(reported, self))

    def version(self) -> int:
        return int(self.status().get("version", 0))

    def logs(self) -> str:
        command = ["docker", "compose", "--project-name", self.name, "logs", "--no-color", "--tail", "40"]
        return subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True).stdout[-8000:]

    def prometheus(self, what: str, **arguments: str) -> Any:
        """The data of a response of Prometheus's HTTP API."""
        address = self.run("port", "prometheus", "9090").strip()
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"http://{address}/api/v1/{what}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]


def wait_until(condition: Callable[[], Any], project: Project, seconds: float = 180.0) -> Any:
    """Polls until the condition holds, and returns its value. If it fails, the message holds the containers' logs."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s:\n{project.run('ps', '--all', check=False)}\n{project.logs()}")
        time.sleep(0.5)
    return value
