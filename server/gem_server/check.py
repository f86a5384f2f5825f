"""Checks the rule of a new run and its options, before anything is started: `python -m gem_server.check FLAGS`.

gem-train runs it. It imports a user's own rule from where the server will look for it, and less than the server does.
"""

from __future__ import annotations

import sys
from typing import Any

import click
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.options import hyperparameter_options

from gem_server.rules import rule_of


@click.command()
@hyperparameter_options()
def main(**settings: Any) -> None:
    """Exits with 2 and one line that names what is wrong if no server takes these hyper-parameters."""
    try:
        rule_of(Hyperparameters(**settings))
    except ValueError as error:
        click.echo(f"gem-server: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
