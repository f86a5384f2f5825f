"""The server that a command of gem-ctl talks to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from gem_api.process.addresses import DEFAULT_PORT
from gem_api.process.options import credentials
from gem_client import Admin
from gem_client.transport.security import Security

from gem_ctl.local_runs import ADMIN_TOKEN, find_runs


@dataclass(frozen=True)
class Target:
    """The server that a command talks to.

    Attributes:
        given: The server's address, if the user named one.
        runs: Folder with gem-train's runs. Without an address, the server of the run in progress there is used.
        timeout: Seconds to wait for a response.
        options: The options for the token and TLS.
        backup_keep: Number of a run's backups to keep; None to keep all.
    """

    given: str | None
    runs: Path
    timeout: float
    options: dict[str, Any]
    backup_keep: int | None = None

    @cached_property
    def server(self) -> str:
        """The server's address. Raises click.UsageError if several local runs are in progress."""
        if self.given is not None:
            return self.given
        local_runs = find_runs(self.runs)
        if len(local_runs) > 1:
            choices = "".join(f"\n  --server {address}   {folder}" for folder, address in local_runs.items())
            raise click.UsageError(f"{len(local_runs)} runs are in progress in {self.runs}: choose one\n{choices}")
        for folder, address in local_runs.items():
            click.echo(f"gem-ctl: {folder}, server {address}", err=True)
            if self.options.get("token_file") is None and (folder / ADMIN_TOKEN).exists():
                self.options["token_file"] = folder / ADMIN_TOKEN
            return address
        return f"127.0.0.1:{DEFAULT_PORT}"

    @property
    def folder(self) -> Path | None:
        """The folder of the server's run; None if it is not one of gem-train's on this machine."""
        return {address: folder for folder, address in find_runs(self.runs).items()}.get(self.server)

    def credentials(self, address: str | None = None) -> dict[str, Any]:
        """Arguments for `Admin` and `connect`, for the server or this address. Warns if the token would go unencrypted."""
        server = address or self.server  # if it is a local run's, so is the token
        given = credentials(self.options)
        if Security(**given).exposes_token(server):
            click.echo(f"gem-ctl: the token is sent to {server} UNENCRYPTED: use --tls-ca", err=True)
        return given

    def admin(self, address: str | None = None) -> Admin:
        """Opens a connection to the server, or to that of another range at this address."""
        return Admin(address or self.server, self.timeout, **self.credentials(address))
