"""The members of a cluster: the command lines and settings of its servers and workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.host_limits import apply_threads, default_limit
from gem_api.process.options import flags, handed_over, settings_without_flags
from gem_api.process.progress import say
from gem_api.ranges import Range

from gem_worker.launcher.cluster import (
    WORKER_NICENESS,
    Cluster,
    Member,
    Process,
    ends_together,
    free_ports,
    python,
    spread,
)
from gem_worker.launcher.copies import Worker
from gem_worker.launcher.run_folder import RunFolder

_THIS_MACHINE = "127.0.0.1"
_CHECKPOINT_SECONDS = 10
_STOPPED_STATUS = 143  # of a worker after SIGTERM, as in shells: 128 plus the number of the signal


class Host(Protocol):
    """The machines of a run's workers. As text, what they are called."""

    @property
    def remote(self) -> bool:
        """Whether workers may be on other machines. Then the servers ask for tokens."""

    def connect(self) -> str:
        """The address of this machine for the workers. Raises ClusterError if workers can't be started there."""

    def member(self, name: str, log: Path, flags: list[str], settings: Mapping[str, Any], token: str | None) -> Member:
        """A process of workers, not started. `flags` and `settings` are gem-worker's, `token` its access token."""


class ThisMachine:
    """Workers as processes of this machine."""

    remote = False

    def connect(self) -> str:
        return _THIS_MACHINE

    def member(self, name: str, log: Path, flags: list[str], settings: Mapping[str, Any], token: str | None) -> Member:
        (device,) = [flag for flag in flags if flag.startswith("--device=")] or ["--device=cpu"]
        from gem_worker.device import on_cpu  # PyTorch takes seconds, which --help need not

        on = on_cpu(device.removeprefix("--device="))
        return Worker(name, log, python("gem_worker", *flags), settings, WORKER_NICENESS, on)


class Place(NamedTuple):
    """The addresses of a server.

    Attributes:
        address: HOST:PORT for its clients.
        metrics: HOST:PORT of its live page and metrics.
    """

    address: str
    metrics: str


def places(host: str, servers: int) -> list[Place]:
    """Free addresses for servers on this machine, the leader's first; `host` is how workers reach this machine."""
    ports = free_ports([host] * servers + [_THIS_MACHINE] * servers)
    pairs = zip(ports[:servers], ports[servers:], strict=True)
    return [Place(f"{_bracketed(host)}:{port}", f"{_THIS_MACHINE}:{metrics}") for port, metrics in pairs]


def make_cluster(
    folder: RunFolder,
    options: dict[str, Any],
    hyperparameters: Hyperparameters,
    listening: list[Place],
    host: Host,
    resume: bool,
) -> Cluster:
    """The servers, one for each place, and the workers on a host; nothing is started."""
    token = folder.write_tokens() if host.remote else None
    servers = [_server(folder, options, hyperparameters, listening, index, host) for index in range(len(listening))]
    groups = spread(options["workers"], options["processes"] or options["workers"])
    own, settings = handed_over("worker", options)
    common = [f"--server={listening[0].address}", *own]
    settings["stopped_status"] = _STOPPED_STATUS  # not 0: a worker that somebody else stops is not done
    workers = [host.member(*_worker(folder, group, common), settings, token) for group in groups]
    return Cluster(servers, workers, lambda line: say(f"  {line}"), resume, ends_together(hyperparameters))


def _server(
    folder: RunFolder,
    options: dict[str, Any],
    hyperparameters: Hyperparameters,
    listening: list[Place],
    index: int,
    host: Host,
) -> Member:
    held, place = Range(index, len(listening)), listening[index]
    own, settings_of_own = handed_over("server", options)
    command = python(
        "gem_server",
        f"--listen={place.address}",
        f"--metrics-listen={place.metrics}",
        *([f"--history={folder.commits}"] if held.leads else []),
        f"--checkpoint-dir={folder.checkpoints_of(held)}",
        *own,
        *flags(hyperparameters),
        *(["--until-stopped"] if hyperparameters.endless else []),
        *([f"--tokens={folder.tokens}"] if host.remote else []),
        *([] if held.whole else _flags_of_range(held, [each.address for each in listening[1:]])),
    )
    settings = {
        "lane_listen": f"{place.address.rpartition(':')[0]}:0",  # the port after a free one need not be free
        "checkpoint_interval": _CHECKPOINT_SECONDS,
        **settings_of_own,
        **settings_without_flags(hyperparameters),
        **({} if held.whole else _share_of_machine(held.count)),
        **options["server_settings"],
    }
    name = "server" if held.whole else f"server-{index}"
    return Process(name, folder.logs / f"{name}.log", command, settings)


def _flags_of_range(held: Range, peers: list[str]) -> list[str]:
    """The flags of one of several servers."""
    return [f"--range={held}", *([f"--peers={','.join(peers)}"] if held.leads else [])]


def _share_of_machine(servers: int) -> dict[str, Any]:
    """The part of the machine's cores and memory that each of several servers may take."""
    return {"apply_threads": apply_threads(servers), "memory_limit": default_limit() // servers}


def _worker(folder: RunFolder, numbers: range, common: list[str]) -> tuple[str, Path, list[str]]:
    """The name, the log and the flags of the process for these workers.

    A worker keeps its name when a resumed run spreads them over other processes."""
    if len(numbers) == 1:
        name, names = f"worker-{numbers[0]}", [f"--name=worker-{numbers[0]}"]
    else:
        name = f"workers-{numbers[0]}-{numbers[-1]}"
        names = ["--name=worker", f"--workers={len(numbers)}"]
    names.append(f"--first-worker={numbers[0]}")
    return name, folder.logs / f"{name}.log", [*names, *common]


def _bracketed(host: str) -> str:
    """The host as it stands before a port."""
    return f"[{host}]" if ":" in host else host
