"""The members of a cluster: the command lines of its servers and workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.host_memory import default_limit
from gem_api.process.options import flags
from gem_api.ranges import Range

from gem_worker.command import cores, exchange_flags
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
from gem_worker.launcher.run_folder import RunFolder

_THIS_MACHINE = "127.0.0.1"
_CHECKPOINT_SECONDS = 10
_MAX_APPLY_THREADS = 8  # as gem-server's own default


class Place(NamedTuple):
    """Where a server listens.

    Attributes:
        address: HOST:PORT for its clients.
        metrics: HOST:PORT of its live page and metrics.
    """

    address: str
    metrics: str


def places(host: str, servers: int) -> list[Place]:
    """Free addresses for servers on this machine, the lead's first; `host` is how workers reach this machine."""
    ports = free_ports([host] * servers + [_THIS_MACHINE] * servers)
    pairs = zip(ports[:servers], ports[servers:], strict=True)
    return [Place(f"{_bracketed(host)}:{port}", f"{_THIS_MACHINE}:{metrics}") for port, metrics in pairs]


def make_cluster(
    folder: RunFolder, options: dict[str, Any], hyperparameters: Hyperparameters, listening: list[Place], resume: bool
) -> Cluster:
    """The servers, one for each place, and the workers; nothing is started."""
    if options["on"] == "ray":
        folder.write_tokens()
    servers = [_server(folder, options, hyperparameters, listening, index) for index in range(len(listening))]
    groups = spread(options["workers"], options["processes"] or options["workers"])
    common = _worker_flags(options, listening[0].address)
    member = _ray_member(folder, options) if options["on"] == "ray" else _process
    workers = [_worker(folder, group, common, member) for group in groups]
    return Cluster(servers, workers, lambda line: click.echo(f"  {line}"), resume, ends_together(hyperparameters))


def _server(
    folder: RunFolder, options: dict[str, Any], hyperparameters: Hyperparameters, listening: list[Place], index: int
) -> Member:
    held, place = Range(index, len(listening)), listening[index]
    command = python(
        "gem_server",
        f"--listen={place.address}",
        f"--lane-listen={place.address.rpartition(':')[0]}:0",  # the port after a free one need not be free
        f"--metrics-listen={place.metrics}",
        *([f"--history={folder.commits}"] if held.leads else []),
        f"--checkpoint-dir={folder.checkpoints_of(held)}",
        f"--checkpoint-interval={_CHECKPOINT_SECONDS}",
        f"--durability={options['durability']}",
        f"--lease-seconds={options['lease_seconds']}",
        f"--log-level={options['log_level']}",
        *flags(hyperparameters),
        *(["--until-stopped"] if hyperparameters.endless else []),
        *([f"--tokens={folder.tokens}"] if options["on"] == "ray" else []),
        *([] if held.whole else _flags_of_range(held, [each.address for each in listening[1:]])),
    )
    name = "server" if held.whole else f"server-{index}"
    return Process(name, folder.logs / f"{name}.log", command)


def _flags_of_range(held: Range, peers: list[str]) -> list[str]:
    """The flags of one of several servers, which share the machine's cores and memory."""
    return [
        f"--range={held}",
        *([f"--peers={','.join(peers)}"] if held.leads else []),
        f"--apply-threads={min(_MAX_APPLY_THREADS, cores() // held.count or 1)}",
        f"--memory-limit={default_limit() // held.count}",
    ]


def _worker_flags(options: dict[str, Any], address: str) -> list[str]:
    """The flags that all worker processes have in common."""
    common = [f"--server={address}", f"--task={options['task']}", f"--device={options['device']}", *exchange_flags(options)]
    common.append(f"--log-level={options['log_level']}")
    if options["data"]:
        common.append(f"--data={options['data']}")
    if options["step_seconds"]:
        common.append(f"--step-seconds={options['step_seconds']}")
    if options["turns"] != "random":
        common.append(f"--turns={options['turns']}")
    return common


def _process(name: str, log: Path, flags: list[str]) -> Member:
    """Workers in a process of this machine."""
    return Process(name, log, python("gem_worker", *flags), WORKER_NICENESS)


def _ray_member(folder: RunFolder, options: dict[str, Any]) -> Callable[[str, Path, list[str]], Member]:
    """Makes a process of workers in Ray from its name, its log and its flags."""
    from gem_worker.launcher import on_ray

    resources, token = on_ray.parsed(options["resources"]), folder.worker_token.read_text().strip()
    return lambda name, log, flags: on_ray.Actor(name, log, flags, token, resources)


def _worker(folder: RunFolder, numbers: range, common: list[str], member: Callable[[str, Path, list[str]], Member]) -> Member:
    """The process for these workers. A worker keeps its name when a resumed run spreads them over other processes."""
    if len(numbers) == 1:
        name, names = f"worker-{numbers[0]}", [f"--name=worker-{numbers[0]}"]
    else:
        name = f"workers-{numbers[0]}-{numbers[-1]}"
        names = ["--name=worker", f"--workers={len(numbers)}"]
    names.append(f"--first-worker={numbers[0]}")
    return member(name, folder.logs / f"{name}.log", [*names, *common])


def _bracketed(host: str) -> str:
    """The host as it stands before a port."""
    return f"[{host}]" if ":" in host else host
