"""gem-server: the command."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.hyperparameters import Hyperparameters
from gem_api.process import logs
from gem_api.process.allocator import tune_allocator
from gem_api.process.lifetime import end_with_launcher, long_imports
from gem_api.process.options import SETTINGS, WithHeadings, command_options, expanded, without_end
from gem_api.process.printable import printable
from gem_api.process.settings import ServerSettings
from gem_api.process.tracing import export

from gem_server.config import ServerConfig, StartError
from gem_server.event_loop import DecidingLoop
from gem_server.security.tls import TlsFiles

_HYPERPARAMETERS = [field.name for field in fields(Hyperparameters)]


def _allow_many_files() -> None:
    """Raises the limit of open files, on many systems 1,024: each worker takes one, or two with shared memory."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):  # macOS has another limit below an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    if cert is not None and key is not None:
        return TlsFiles(cert, key, client_ca)
    if cert is not None or key is not None or client_ca is not None:
        raise click.UsageError("TLS needs both --tls-cert and --tls-key; the setting tls_client_ca may come with them")
    return None


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@command_options("server")
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
    config = ServerConfig(
        hyperparameters=hyperparameters,
        given=frozenset(stated),
        until_stopped=options["until_stopped"],
        tls=_tls(options["tls_cert"], options["tls_key"], options["tls_client_ca"]),
        **{field.name: options[field.name] for field in fields(ServerSettings)},
    )
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
