"""Checks the rule of a new run and its options, before anything is started: `python -m gem_server.check`.

gem-train runs it. It imports a user's own rule from where the server will look for it, and less than the server does.
"""

from __future__ import annotations

import sys
from typing import Any

import click
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.options import SETTINGS, expanded, hyperparameter_options

from gem_server.rules import rule_of


@click.command(context_settings=SETTINGS)
@hyperparameter_options
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Exits with 2 and one line that names what is wrong if no server takes these hyper-parameters."""
    try:
        rule_of(Hyperparameters(**expanded(context)[0]))
    except ValueError as error:
        click.echo(f"gem-server: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
