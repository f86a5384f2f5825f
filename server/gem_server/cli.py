"""gem-server: the command."""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.hyperparameters import SHARD_SIZE, Hyperparameters
from gem_api.process import logs
from gem_api.process.allocator import tune_allocator
from gem_api.process.lifetime import end_with_launcher
from gem_api.process.options import (
    DERIVED_SHARD_SIZE,
    DURABILITIES,
    SETTINGS,
    Number,
    WithHeadings,
    given,
    hyperparameter_options,
    log_format_option,
    option,
    until_stopped_option,
    without_end,
)

from gem_server.config import ServerConfig, StartError
from gem_server.host_memory import default_limit
from gem_server.security.tls import TlsFiles
from gem_server.server import serve

_NAMES = [field.name for field in fields(Hyperparameters)]


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
            self.fail(f"{value!r} is no size; write 8G or 512M", param, ctx)
        if size < 0:
            self.fail("a size can't be negative", param, ctx)
        return size


def _allow_many_files() -> None:
    """A worker takes a connection and, with shared memory, a descriptor more; many systems allow 1,024 unless asked."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _socket(choice: str) -> str:
    """Where the socket is; empty for nowhere."""
    if choice == "auto":
        return f"@gem-{secrets.token_hex(8)}" if sys.platform == "linux" else ""
    return "" if choice == "off" else choice


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    if cert is not None and key is not None:
        return TlsFiles(cert, key, client_ca)
    if cert is not None or key is not None or client_ca is not None:
        raise click.UsageError("TLS needs both --tls-cert and --tls-key; --tls-client-ca may come with them")
    return None


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@option("--listen", default="127.0.0.1:50051", help="Address to serve gRPC on; 0.0.0.0:50051 lets other machines in.")
@option(
    "--tokens",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of bearer tokens that are asked for: a line TOKEN ROLE [WORKER] for each, with a role of worker, evaluator and "
    "admin. Read again when it changes.",
)
@option(
    "--tls-cert",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The server's certificate and those above it, PEM: encrypts. Read again when it changes.",
)
@option("--tls-key", type=click.Path(dir_okay=False, path_type=Path), help="The certificate's private key, PEM.")
@option(
    "--tls-client-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Ask clients for certificates of these authorities, PEM.",
)
@option("--metrics-listen", default="127.0.0.1:9464", help="Address to serve Prometheus metrics on; empty for none.")
@option(
    "--checkpoint-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for checkpoints; without it none are written.",
)
@option(
    "--checkpoint-interval",
    type=Number(min=0),
    default=30.0,
    help="Seconds between checkpoints; 0: only on request and at the end.",
)
@option(
    "--durability",
    type=click.Choice(DURABILITIES),
    default="snapshot",
    show_default="snapshot with --checkpoint-dir, else memory",
    help="What survives a crash. memory: nothing but checkpoints asked for; snapshot: all up to the last checkpoint; "
    "log: every commit that was answered.",
)
@option(
    "--log-limit",
    type=Bytes(),
    default="1G",
    help="With --durability log: a checkpoint is written when the log since the last one is longer.",
)
@option("--checkpoint-keep", type=click.IntRange(1), default=3, help="How many checkpoints to keep.")
@option("--resume/--no-resume", default=False, help="Go on from the newest checkpoint in --checkpoint-dir, if there is one.")
@option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that gets a line of CSV for every commit; an older file goes to FILE.old.",
)
@option(
    "--lease-seconds",
    type=Number(1, 3600),
    default=15.0,
    help="How long a worker may be silent before its lease ends.",
)
@option(
    "--memory-limit",
    type=Bytes(),
    default=default_limit,
    show_default="4/5 of the machine's or container's",
    help="Most memory to hold for the model and the workers, for example 8G; 0: no limit.",
)
@option(
    "--apply-threads",
    type=click.IntRange(0),
    default=0,
    help="Threads that a commit of a large model is applied in; 0: one for each core, at most 8.",
)
@option(
    "--memory-socket",
    default="auto",
    help="Unix socket through which workers on this machine get memory that they share with the server, instead of sending "
    "tensors: auto for one without a file; a path, in a folder that containers share; or off.",
)
@option(
    "--min-workers",
    type=click.IntRange(1),
    default=1,
    help="Hand out the first shard only when so many workers have joined, so that all start together.",
)
@option(
    "--max-norm-ratio",
    type=Number(min=0),
    default=0.0,
    help="Refuse a commit whose gradient has a norm of more than so many times the median of the run's last 100; 0: take all. "
    "Honest runs have been seen to reach 50.",
)
@option(
    "--quarantine-after",
    type=click.IntRange(0),
    show_default="3 with --max-norm-ratio, else 0",
    help="Put a worker out of the run, and keep it out, once so many of its gradients in a row were refused as too large or no "
    "numbers; 0: never. gem-ctl quarantine lets it in again.",
)
@hyperparameter_options(shard_size=(SHARD_SIZE, DERIVED_SHARD_SIZE))
@until_stopped_option
@log_format_option
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Serves a GEM parameter server: holds the central variable and applies the workers' commits in FIFO order.

    Every option can also be set by the environment variable shown with it; a flag wins over the environment.
    SIGTERM or Ctrl-C finishes the queued commits and writes a checkpoint (with --checkpoint-dir).

    Exit status: 0 after SIGTERM, Ctrl-C or gem-ctl drain; 1 after an unexpected error; 2 if it can't start (wrong options, an
    address in use, no usable checkpoint), or can't write its log or its last checkpoint.
    """
    settings = Hyperparameters(**{name: options[name] for name in _NAMES})
    user_gave = given(context) & set(_NAMES)
    if options["until_stopped"]:
        settings = without_end(settings, user_gave)
        user_gave |= {"epochs", "steps"}
    settings = settings.with_defaults(user_gave)
    tune_allocator()
    _allow_many_files()
    end_with_launcher()
    log = logs.configure(options["log_format"])
    config = ServerConfig(
        settings=settings,
        given=frozenset(user_gave),
        listen=options["listen"],
        metrics_listen=options["metrics_listen"],
        checkpoint_dir=options["checkpoint_dir"],
        checkpoint_interval=options["checkpoint_interval"],
        keep=options["checkpoint_keep"],
        resume=options["resume"],
        history=options["history"],
        lease_seconds=options["lease_seconds"],
        memory_limit=options["memory_limit"],
        min_workers=options["min_workers"],
        apply_threads=options["apply_threads"],
        durability=options["durability"],
        log_limit=options["log_limit"],
        memory_socket=_socket(options["memory_socket"]),
        max_norm_ratio=options["max_norm_ratio"],
        quarantine_after=options["quarantine_after"],
        until_stopped=options["until_stopped"],
        tokens=options["tokens"],
        tls=_tls(options["tls_cert"], options["tls_key"], options["tls_client_ca"]),
    )
    try:
        asyncio.run(serve(config, log))
    except StartError as error:
        click.echo(f"gem-server: {error}", err=True)
        sys.exit(2)
