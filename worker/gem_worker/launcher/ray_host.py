"""Workers as Ray actors, in the place of processes on this machine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals, getsignal
from signal import signal as set_handler
from typing import Any

import ray
from gem_api.process.options import as_environment
from gem_api.process.progress import say
from ray.exceptions import RayError, RuntimeEnvSetupError

from gem_worker.command import EXIT_FAILED, EXIT_WRONG_USE
from gem_worker.launcher.cluster import MAX_RESTARTS, ClusterError, Member, require_listener
from gem_worker.launcher.ray_placement import Placement
from gem_worker.launcher.ray_worker import CONTROL

_REPORT_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_NEVER_BEGAN = (
    f"Ray started it {MAX_RESTARTS + 1} times at most, and it ended before it could begin: while its process started or "
    "imported modules. Look at Ray's logs on its node: /tmp/ray/session_latest/logs/worker-*.err and raylet.out\n"
)


def without_runs(runtime_env: dict[str, Any] | None, runs: Sequence[Path]) -> dict[str, Any] | None:
    """The environment, without the folders of runs that lie in its working_dir: they hold tokens and checkpoints, and Ray would
    copy them to every node."""
    where = (runtime_env or {}).get("working_dir")
    if runtime_env is None or where is None or "://" in str(where):
        return runtime_env
    root = Path(where).resolve()
    inside = [run.resolve().relative_to(root) for run in runs if run.resolve().is_relative_to(root)]
    excludes = [*runtime_env.get("excludes", ()), *(f"/{folder}/" for folder in inside if folder.parts)]
    return {**runtime_env, "excludes": excludes}


@dataclass(frozen=True)
class RayHost:
    """Workers as actors in a Ray cluster.

    Attributes:
        address: "auto", "local" or "host:port" of the cluster.
        placement: What Ray is asked for each process of workers.
        runtime_env: Ray's environment for the workers, such as {"working_dir": "."}.
    """

    address: str
    placement: Placement
    runtime_env: dict[str, Any] | None = None
    remote = True

    @classmethod
    def for_run(cls, options: dict[str, Any], runtime_env: dict[str, Any] | None = None) -> RayHost:
        """The host that these options of gem-train ask for. Raises ClusterError."""
        if options["working_dir"]:
            runtime_env = {"working_dir": options["working_dir"], **(runtime_env or {})}
        runs = [Path(folder) for folder in (options["runs"], options["resume"]) if folder]
        placement = Placement.parsed(options["resources"], options["ray_labels"], options["ray_spread"])
        return cls(options["ray_address"], placement, without_runs(runtime_env, runs))

    def __str__(self) -> str:
        return f"Ray ({self.placement} each)"

    def connect(self) -> str:
        """Connects this process to the cluster, unless it is connected; returns this node's address for the other nodes.

        Raises:
            ClusterError: There is no such cluster, or it can't run the workers.
        """
        if self.address.startswith("ray://"):
            raise ClusterError(
                f"{self.address} is an address of Ray Client, whose driver runs outside the cluster, so that workers can't "
                "reach the server: run this on a node of the cluster, or with `ray job submit`"
            )
        if ray.util.client.ray.is_connected():
            raise ClusterError("this process is connected through Ray Client, which workers can't reach: use `ray job submit`")
        if not ray.is_initialized():
            _require_listener(self.address)
            _init(self.address, self.runtime_env)
        elif self.runtime_env:
            raise ClusterError("this process has connected to Ray before: give the runtime_env to that ray.init()")
        self._check_room()
        return str(ray.util.get_node_ip_address())

    def member(self, name: str, log: Path, flags: list[str], settings: Mapping[str, Any], token: str | None) -> Actor:
        return Actor(name, log, flags, settings, token, self.placement)

    def _check_room(self) -> None:
        """Says so if no node can run the workers. That is no error: an autoscaler may add one, and Ray does not tell whether it
        has an autoscaler. Raises ClusterError if this process is in a placement group, which the workers would leave."""
        if ray.util.get_current_placement_group() and (self.placement.spread or self.placement.labels):
            raise ClusterError(
                "this process runs in a placement group, as each trial of Ray Tune does, and the group decides where workers "
                "run: leave out spread and labels"
            )
        if why := self.placement.why_waiting(ray.nodes()):
            say(f"{why}. The workers wait until Ray has one")


@contextmanager
def connection() -> Iterator[None]:
    """Ends a connection to Ray that the block has made."""
    before = ray.is_initialized()
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def _init(address: str, runtime_env: dict[str, Any] | None) -> None:
    how = {"include_dashboard": False} if address == "local" else {}
    handler = getsignal(SIGTERM)
    try:
        ray.init(address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.WARNING, **how)
        if threading.current_thread() is threading.main_thread():
            set_handler(SIGTERM, handler)  # Ray's own would end this process at once
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        why = " ".join(str(error).split())
        raise ClusterError(
            f"can't connect to a Ray cluster at {address!r}: {why}. Start one with `ray start --head`, or use the address "
            "local; if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, as on its nodes"
        ) from None


def _require_listener(address: str) -> None:
    """Raises ClusterError if nothing listens at a "host:port". Ray would try for minutes."""
    try:
        if ":" in address:
            require_listener(address, _CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Ray cluster at {address!r}: {error}; start one with `ray start --head`") from None


@dataclass
class Actor(Member):
    """A member that is a Ray actor: workers in one process, on any node.

    Ray restarts the actor if its process or its node dies. If the worker ends with a status, the launcher starts a new actor.

    Attributes:
        flags: The flags of gem-worker.
        settings: Its settings without an option, by their keys.
        token: The access token of its workers.
        placement: What Ray is asked for it.
    """

    flags: list[str]
    settings: Mapping[str, Any]
    token: str | None = field(repr=False)
    placement: Placement
    _actor: Any = field(default=None, init=False)
    _work: Any = field(default=None, init=False)
    _report: Any = field(default=None, init=False)
    _reported_at: float = field(default=0.0, init=False)
    _place: tuple[str, int] | None = field(default=None, init=False)  # host and process id
    _alive: bool = field(default=False, init=False)
    _restarted: str | None = field(default=None, init=False)
    _status: int | None = field(default=None, init=False)

    def start(self, *extra: str) -> None:
        self._begin_log()
        self._status, self._place, self._alive = None, None, False
        try:
            self._actor = self.placement.actor_class(self._name_in_ray).remote()
        except ValueError as error:  # a placement group has no room for it, or its name is taken
            raise ClusterError(f"Ray can't start {self.name}: {error}") from None
        self._work = self._actor.work.remote(self.name, [*self.flags, *extra], as_environment(self.settings), self.token)
        self._ask()

    @property
    def _name_in_ray(self) -> str:
        """Tells the run too: the server has its address for itself."""
        (server,) = (flag.removeprefix("--server=") for flag in self.flags if flag.startswith("--server="))
        return f"{self.name}@{server}"

    @property
    def status(self) -> int | None:
        if self._status is None and self._actor is not None:
            self._follow()
            if ray.wait([self._work], timeout=0)[0]:
                self._end()
        return self._status

    @property
    def waiting(self) -> bool:
        return self._status is None and not self._alive

    def restarted(self) -> str | None:
        how, self._restarted = self._restarted, None
        return how

    def signal(self, number: Signals) -> None:
        if self.status is not None or self._actor is None:
            return
        if number == SIGKILL or self.waiting:
            ray.kill(self._actor)
            self._status = -SIGKILL
        else:
            self._actor.stop.options(concurrency_group=CONTROL, max_task_retries=0).remote()

    def wait(self, seconds: float) -> None:
        if self.status is None and self._actor is not None:
            ray.wait([self._work], timeout=max(0.0, seconds))
            if self.status is None:
                self.signal(SIGKILL)

    def failure_excerpt(self) -> str:
        words = super().failure_excerpt()
        if self._status == EXIT_WRONG_USE and "can't import" in words:
            words += (
                "\nGive the nodes the task's module: --working-dir FOLDER, or runtime_env={'working_dir': FOLDER} in Python"
            )
        return words

    def _ask(self) -> None:
        """Asks the actor where it is and what it has written."""
        self._report = self._actor.report.options(concurrency_group=CONTROL, max_task_retries=0).remote()
        self._reported_at = time.monotonic()

    def _follow(self) -> None:
        """Takes in the actor's report once it is there, and asks for the next one."""
        if not ray.wait([self._report], timeout=0)[0] or time.monotonic() < self._reported_at + _REPORT_SECONDS:
            return
        try:
            host, pid, output = ray.get(self._report)
        except RayError:  # its process is dead, and Ray restarts it
            self._alive = False
        else:
            self._write(output)
            if self._place not in (None, (host, pid)):
                self._restarted = f"died; Ray restarted it on {host}"
            self._place, self._alive = (host, pid), True
        self._ask()

    def _end(self) -> None:
        """Takes in how the work ended, and gives the actor's resources back."""
        try:
            self._status, output = ray.get(self._work)
        except RuntimeEnvSetupError as error:
            self._status, output = EXIT_WRONG_USE, f"{error}\n"
        except RayError as error:
            self._status, output = EXIT_FAILED, f"{error}\n"
            if self._place is None:
                self._status, output = EXIT_WRONG_USE, output + _NEVER_BEGAN
        self._write(output)
        ray.kill(self._actor)

    def _write(self, output: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(output)
