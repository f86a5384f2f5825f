"""The five commands, and their options."""

from __future__ import annotations

from collections.abc import Iterator

import click
from gem_ctl.cli import main as ctl
from gem_server.cli import main as server
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.launcher.cli import main as train
from gem_worker.process.cli import main as worker

COMMANDS: dict[str, click.Command] = {
    "gem-server": server, "gem-worker": worker, "gem-evaluator": evaluator, "gem-train": train, "gem-ctl": ctl,
}  # fmt: skip


def options(command: click.Command) -> Iterator[click.Option]:
    """Its own options, but --version."""
    yield from (each for each in command.params if isinstance(each, click.Option) and each.name != "version")


def with_subcommands(command: click.Command) -> Iterator[click.Command]:
    """A command and all those beneath it."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from with_subcommands(inner)


def all_options(command: click.Command) -> Iterator[click.Option]:
    """The options of a command, and of those beneath it."""
    for each in with_subcommands(command):
        yield from options(each)
