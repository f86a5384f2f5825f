"""Workers as Ray actors, in the place of processes on this machine."""

from __future__ import annotations

import logging
import socket
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
from ray.exceptions import RayError, RuntimeEnvSetupError

from gem_worker.command import EXIT_FAILED, EXIT_WRONG_USE
from gem_worker.launcher.cluster import MAX_RESTARTS, ClusterError, Member
from gem_worker.ray.worker import Worker

_REPORT_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_NEVER_BEGAN = (
    f"Ray started it {MAX_RESTARTS + 1} times at most, and it ended before it could begin: while its process started or "
    "imported modules. Look at Ray's logs on its node: /tmp/ray/session_latest/logs/worker-*.err and raylet.out\n"
)
_CONTROL = "control"  # the actor's thread for everything but its work


def parsed(text: str) -> dict[str, float]:
    """Ray's resources from "CPU=1,GPU=0.5". Raises ClusterError."""
    try:
        pairs = [pair.partition("=") for pair in text.split(",")]
        resources = {name.strip(): float(amount) for name, _, amount in pairs}
        actor_class(resources)  # Ray checks the amounts
    except (ValueError, OverflowError) as error:
        raise ClusterError(f"--resources {text!r}: write NAME=AMOUNT,..., such as CPU=1,GPU=0.5 ({error})") from None
    return resources


def actor_class(resources: dict[str, float]) -> Any:
    """The class of an actor that Ray restarts if it dies, with the work that it was doing, until it has died too often: then
    the launcher makes another, or gives up. Raises ValueError."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return ray.remote(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        memory=resources.get("memory"),
        resources=others,
        max_restarts=MAX_RESTARTS,
        max_task_retries=-1,
        concurrency_groups={_CONTROL: 1},
    )(Worker)


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
        resources: What each process of workers needs, by name; some node must have that much.
        runtime_env: Ray's environment for the workers, such as {"working_dir": "."}.
    """

    address: str
    resources: dict[str, float]
    runtime_env: dict[str, Any] | None = None
    remote = True

    @classmethod
    def for_run(cls, options: dict[str, Any], runtime_env: dict[str, Any] | None = None) -> RayHost:
        """The host that these options of gem-train ask for. Raises ClusterError."""
        if options["working_dir"]:
            runtime_env = {"working_dir": options["working_dir"], **(runtime_env or {})}
        runs = [Path(folder) for folder in (options["runs"], options["resume"]) if folder]
        return cls(options["ray_address"], parsed(options["resources"]), without_runs(runtime_env, runs))

    def __str__(self) -> str:
        return f"Ray ({_written(self.resources)} each)"

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
        _require_room(self.resources)
        return str(ray.util.get_node_ip_address())

    def member(self, name: str, log: Path, flags: list[str], settings: Mapping[str, Any], token: str | None) -> Actor:
        return Actor(name, log, flags, settings, token, self.resources)


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
    host, separator, port = address.rpartition(":")
    try:
        if separator:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Ray cluster at {address!r}: {error}; start one with `ray start --head`") from None


def _require_room(resources: dict[str, float]) -> None:
    """Raises ClusterError if no node has these resources, and no autoscaler could add one."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in resources.items()) for node in nodes):
        return
    if ray._private.state.state.get_max_resources_from_cluster_config() is None:  # there is no public way to ask
        have = "; ".join(_written({name: node.get(name, 0) for name in resources}) for node in nodes)
        raise ClusterError(
            f"no node of the Ray cluster has the resources for a worker: {_written(resources)} needed, the nodes have {have}"
        )


def _written(resources: Mapping[str, float]) -> str:
    """Resources as --resources takes them."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())


@dataclass
class Actor(Member):
    """A member that is a Ray actor: workers in one process, on any node.

    Ray restarts the actor if its process or its node dies. If the worker ends with a status, the launcher starts a new actor.

    Attributes:
        flags: The flags of gem-worker.
        settings: Its settings without an option, by their keys.
        token: The access token of its workers.
        resources: What Ray reserves for it, by name.
    """

    flags: list[str]
    settings: Mapping[str, Any]
    token: str | None = field(repr=False)
    resources: dict[str, float]
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
        self._actor = actor_class(self.resources).remote()
        self._work = self._actor.work.remote(self.name, [*self.flags, *extra], as_environment(self.settings), self.token)
        self._ask()

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
            self._actor.stop.options(concurrency_group=_CONTROL, max_task_retries=0).remote()

    def wait(self, seconds: float) -> None:
        if self.status is None and self._actor is not None:
            ray.wait([self._work], timeout=max(0.0, seconds))
            if self.status is None:
                self.signal(SIGKILL)

    def last_words(self) -> str:
        words = super().last_words()
        if self._status == EXIT_WRONG_USE and "can't import" in words:
            words += (
                "\nGive the nodes the task's module: --working-dir FOLDER, or runtime_env={'working_dir': FOLDER} in Python"
            )
        return words

    def _ask(self) -> None:
        """Asks the actor where it is and what it has written."""
        self._report = self._actor.report.options(concurrency_group=_CONTROL, max_task_retries=0).remote()
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
