"""gem-server: the command."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.hyperparameters import SHARD_SIZE, Hyperparameters
from gem_api.process import logs
from gem_api.process.allocator import tune_allocator
from gem_api.process.lifetime import end_with_launcher, long_imports
from gem_api.process.options import (
    DERIVED_SHARD_SIZE,
    DURABILITIES,
    SETTINGS,
    Number,
    Whole,
    WithHeadings,
    expanded,
    hyperparameter_options,
    log_options,
    until_stopped_option,
    without_end,
)
from gem_api.process.printable import printable
from gem_api.process.settings_file import config_option, setting
from gem_api.process.tracing import export
from gem_api.ranges import WHOLE, Range

from gem_server.config import ServerConfig, StartError, private_socket
from gem_server.event_loop import DecidingLoop
from gem_server.security.tls import TlsFiles

_HYPERPARAMETERS = [field.name for field in fields(Hyperparameters)]
_FIELDS = {field.name: field for field in fields(ServerConfig)}
_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


class Bytes(click.ParamType[int]):
    """A number of bytes, with an optional K, M, G or T (powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().upper().removesuffix("B").removesuffix("I")
        try:
            shift = 10 * (1 + "KMGT".index(text[-1])) if text[-1:].isalpha() else 0
            size = int(float(text.rstrip("KMGT")) * 2**shift)
        except (ValueError, IndexError, OverflowError):
            self.fail(f"{value!r} is not a size: write 8G or 512M", param, ctx)
        if size < 0:
            self.fail("a size can't be negative", param, ctx)
        return size


def _allow_many_files() -> None:
    """Raises the limit of open files, on many systems 1,024: each worker takes one, or two with shared memory."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):  # macOS has another limit below an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _config_option(flag: str, **how: Any) -> Callable[[Any], Any]:
    """An option for a field of `ServerConfig`, with that field's default; a setting without an option if it has no dashes."""
    field = _FIELDS[flag.partition("/")[0].removeprefix("--").replace("-", "_")]
    default = field.default if field.default_factory is MISSING else field.default_factory
    return (click.option if flag.startswith("-") else setting)(flag, default=default, **how)


def _memory_socket(context: click.Context, param: click.Parameter, choice: str) -> str:
    """The socket's address; empty for none."""
    if choice == "auto":
        return private_socket()
    return "" if choice == "off" else choice


def _lane_listen(context: click.Context, param: click.Parameter, choice: str) -> str | None:
    """The lane's address; empty for none, None for the default."""
    return None if choice == "auto" else "" if choice == "off" else choice


def _range(context: click.Context, param: click.Parameter, choice: str) -> Range:
    try:
        return Range.parse(choice)
    except ValueError as error:
        raise click.BadParameter(str(error), context, param) from None


def _peers(context: click.Context, param: click.Parameter, choice: str) -> tuple[str, ...]:
    return tuple(address.strip() for address in choice.split(",") if address.strip())


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    if cert is not None and key is not None:
        return TlsFiles(cert, key, client_ca)
    if cert is not None or key is not None or client_ca is not None:
        raise click.UsageError("TLS needs both --tls-cert and --tls-key; the setting tls_client_ca may come with them")
    return None


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@click.option(
    "--range",
    default=str(WHOLE),
    callback=_range,
    metavar="I/N",
    help="Which part of the model this server holds, if N servers hold it together: 0/N, which leads, to N-1/N. Otherwise give "
    "all of them the same options, among them --durability log.",
)
@click.option(
    "--peers",
    default="",
    callback=_peers,
    metavar="HOST:PORT,...",
    help="On the server of range 0: the addresses of ranges 1, 2, ..., in this order, as workers reach them.",
)
@_config_option("--listen", help="Address to serve gRPC on; 0.0.0.0:50051 accepts other machines.")
@setting(
    "lane_listen",
    default="auto",
    callback=_lane_listen,
    metavar="auto|off|HOST:PORT",
    help="Address of the lane, a second port that carries workers' commits faster than gRPC does. auto: the host of --listen, "
    "and the port after its port, or a free one if that is taken; off: commits of other machines go over gRPC.",
)
@_config_option(
    "--tokens",
    type=_FILE,
    help="File of bearer tokens; clients without one are rejected. Each line is TOKEN ROLE [WORKER], with the role worker, "
    "evaluator or admin. Read again when it changes.",
)
@click.option("--tls-cert", type=_FILE, help="Encrypt: the server's certificate chain, PEM. Read again when it changes.")
@click.option("--tls-key", type=_FILE, help="The certificate's private key, PEM.")
@setting("tls_client_ca", type=_FILE, help="Reject clients without a certificate from these authorities, PEM.")
@_config_option(
    "--metrics-listen",
    help="Address of the live page (/), the Prometheus metrics (/metrics) and the probes (/healthz, /readyz); empty: none of "
    "them is served.",
)
@_config_option("--checkpoint-dir", type=_FOLDER, help="Folder for checkpoints; without it nothing is saved.")
@_config_option(
    "checkpoint_interval", type=Number(min=0), help="Seconds between checkpoints; 0: only on request and at the end."
)
@_config_option(
    "--durability",
    type=click.Choice(DURABILITIES),
    show_default="snapshot with --checkpoint-dir, else memory",
    help="What survives a crash. memory: only checkpoints made on request; snapshot: everything up to the last checkpoint; "
    "log: every acknowledged commit.",
)
@_config_option(
    "log_limit",
    type=Bytes(),
    show_default="1G",
    help="With --durability log: write a checkpoint when the log since the last one exceeds this size.",
)
@_config_option("checkpoint_keep", type=Whole(1), help="Checkpoints to keep; older ones are removed.")
@_config_option("--resume/--no-resume", help="Continue from the newest checkpoint in --checkpoint-dir, if there is one.")
@_config_option(
    "--history",
    type=_FILE,
    show_default="commits.csv in --checkpoint-dir",
    help="CSV file that gets a line for every commit, of some 100 bytes; /dev/null: none. A new run renames an existing file "
    "to FILE.old.",
)
@_config_option(
    "lease_seconds", type=Number(1, 3600), help="How long a worker may be silent before its lease ends, in seconds."
)
@_config_option(
    "memory_limit",
    type=Bytes(),
    show_default="4/5 of the machine's or container's",
    help="Memory that the model and the workers may take, for example 8G; 0: no limit.",
)
@_config_option(
    "apply_threads",
    type=Whole(0),
    help="Threads that apply a commit of a large model; 0: one for each core, at most 8.",
)
@setting(
    "memory_socket",
    default="auto",
    metavar="auto|off|PATH",
    callback=_memory_socket,
    help="Unix socket of the lane for workers on this machine, who share memory with the server: no tensor goes over the "
    "network. auto: a socket without a file; a path: in a folder that containers share; off: no shared memory.",
)
@_config_option(
    "--min-workers",
    type=Whole(1),
    help="Hand out the first shard only after this number of workers has joined, so that all start together.",
)
@_config_option(
    "start_quiet_seconds",
    type=Number(min=0),
    help="A new run hands out the first shard once no further worker has joined for this number of seconds, so that all start "
    "together although their number is not known; 10 minutes after the first one joined at the latest. min_workers counts "
    "beside it. A resumed run does not wait.",
)
@_config_option(
    "max_norm_ratio",
    type=Number(min=0),
    help="Reject a commit if its gradient's norm exceeds this multiple of the median of the run's last 100; 0: no bound. "
    "Honest runs have reached 50.",
)
@_config_option(
    "quarantine_after",
    type=Whole(0),
    show_default="3 with max_norm_ratio, else 0",
    help="Quarantine a worker after this number of rejected gradients in a row (too large, NaN or infinite); 0: never. "
    "It stays out of the run until gem-ctl quarantine lifts it.",
)
@hyperparameter_options(shard_size=(SHARD_SIZE, DERIVED_SHARD_SIZE))
@until_stopped_option
@log_options
@config_option
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Runs a GEM parameter server: holds the model's parameters and applies the workers' commits in FIFO order.

    Every option is a setting too: an environment variable (GEM_LEARNING_RATE for --learning-rate), or a key in the file of
    --config. The command line wins over the environment, that over the file, that over the default.
    SIGTERM, Ctrl-C or a terminal that closes (without nohup) makes it finish the queued commits and write a checkpoint (with
    --checkpoint-dir). SIGUSR1 prints what each thread does to standard error.

    Exit status: 0 after SIGTERM, Ctrl-C or gem-ctl drain; 1 after an unexpected error; 2 if the server can't start (wrong
    options, an address in use, no usable checkpoint), or can't write its log or its last checkpoint.
    """
    options, user_gave = expanded(context)
    hyperparameters, stated = _hyperparameters(options, user_gave & set(_HYPERPARAMETERS))
    derived = {
        "hyperparameters": hyperparameters,
        "given": frozenset(stated),
        "tls": _tls(options["tls_cert"], options["tls_key"], options["tls_client_ca"]),
    }
    config = ServerConfig(**{name: (options | derived)[name] for name in _FIELDS})
    with long_imports():
        from gem_server.server import serve
    tune_allocator()
    _allow_many_files()
    end_with_launcher()
    logger = logs.configure(options["log_format"], options["log_level"])
    export("gem-server", logger)
    try:
        with asyncio.Runner(loop_factory=DecidingLoop) as runner:
            if runner.run(serve(config, logger)):
                os._exit(0)  # the interpreter's shutdown may crash while a thread compiles
    except StartError as error:
        logs.print_error(f"gem-server: {printable(str(error))}")
        sys.exit(2)


def _hyperparameters(options: dict[str, Any], stated: set[str]) -> tuple[Hyperparameters, set[str]]:
    """The run's hyperparameters, and the names of those that the user stated. Raises click.UsageError."""
    hyperparameters = Hyperparameters(**{name: options[name] for name in _HYPERPARAMETERS})
    if options["until_stopped"]:
        hyperparameters = without_end(hyperparameters, stated)
        stated = stated | {"epochs", "steps"}
    return hyperparameters.with_defaults(stated), stated
