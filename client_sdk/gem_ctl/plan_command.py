"""gem-ctl plan, and the options that describe a run to it and to gem-ctl simulate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from gem_api.hyperparameters import OPTIMIZERS, RULES
from gem_api.process.options import DURABILITIES, Number, Whole, WithHeadings, option, together
from gem_api.ranges import MAX_RANGES
from gem_api.wire import GRADIENT_FORMATS, THETA_FORMATS

from gem_ctl import text
from gem_ctl.amounts import Bytes, Count
from gem_ctl.plan import (
    MAX_WORKERS,
    MEASURED,
    PROXIES,
    SHARED_OPTIMIZER_RULES,
    Costs,
    Setup,
    one_server_only,
    plan,
    servers_needed,
)


def run_options(workers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The options of a run: the fields of `Setup`, and what a commit costs. `workers` is the option for their number."""
    return together(
        option("--parameters", type=Count(), required=True, help="Number of the model's parameters, for example 124M or 1B."),
        workers,
        option(
            "--compute-seconds", type=Number(0, 1e6), default=0.1, help="Seconds for the forward and backward pass of one step."
        ),
        option("--local-steps", type=Whole(1, 10_000), default=1, help="Steps that a worker makes per commit."),
        option("--rule", type=click.Choice(RULES), default="gem", help="The update rule."),
        option("--proxy", type=click.Choice(list(PROXIES)), default="momentum", help="The proxy of the rule gem."),
        option(
            "--optimizer",
            type=click.Choice(OPTIMIZERS),
            default="sgd",
            help="The optimizer that the workers share on the server.",
        ),
        option("--durability", type=click.Choice(DURABILITIES), default="snapshot", help="What the server keeps on disk."),
        option("--shared-memory", is_flag=True, help="The workers run on the server's machine and share memory with it."),
        option("--overlap", is_flag=True, help="The workers compute while a commit is under way."),
        option(
            "--gradient-dtype",
            type=click.Choice(list(GRADIENT_FORMATS)),
            default="float32",
            help="Format of gradients on the network.",
        ),
        option("--theta-dtype", type=click.Choice(list(THETA_FORMATS)), default="float32", help="Format of θ on the network."),
        option("--servers", type=Whole(1, MAX_RANGES), default=1, help="Servers that hold a range of θ each."),
        option("--server-memory", type=Bytes(), help="Memory of each server, such as 32G, to see how many servers are needed."),
        option(
            "--commit-seconds",
            type=Number(1e-9, 1e6),
            default=MEASURED.by_network,
            help="Seconds of the server for each commit, besides those per parameter and byte.",
        ),
        option(
            "--parameter-seconds",
            type=Number(0, 1),
            default=MEASURED.parameter,
            help="Seconds of the server to check and apply a commit, per parameter.",
        ),
        option(
            "--byte-seconds",
            type=Number(0, 1),
            default=MEASURED.byte,
            help="Seconds of the server to receive or send a byte.",
        ),
    )


def costs(options: dict[str, Any]) -> Costs:
    """Takes the costs out of the options."""
    fixed, parameter, byte = (options.pop(name) for name in ("commit_seconds", "parameter_seconds", "byte_seconds"))
    return Costs(by_reference=fixed, by_network=fixed, parameter=parameter, byte=byte)


def setup(ranges: bool, **options: Any) -> Setup:
    """The setup that the options describe. Raises click.UsageError if no server would accept it.

    Args:
        ranges: Whether the user asks how many servers are needed.
        options: The fields of `Setup`.
    """
    shared = options["optimizer"] not in ("sgd", "worker")
    if shared and options["rule"] not in SHARED_OPTIMIZER_RULES:
        raise click.UsageError(f"--optimizer {options['optimizer']} works with --rule {', '.join(SHARED_OPTIMIZER_RULES)}")
    if shared and options["local_steps"] > 1:
        raise click.UsageError("a shared optimizer takes gradients: for --local-steps above 1 use --optimizer sgd or worker")
    described = Setup(**options)
    if (described.servers > 1 or ranges) and (why := one_server_only(described)):
        raise click.UsageError(why)
    return described


@click.command("plan", cls=WithHeadings, short_help="Predicts memory, network traffic and speed of a run.")
@run_options(option("--workers", type=Whole(1, MAX_WORKERS), default=10, help="Number of workers."))
def plan_run(server_memory: int | None, **options: Any) -> None:
    """Predicts what a run needs: the server's memory, the network traffic, and how many workers one server can serve.

    The prediction is based on measurements on two cores that server and workers share. More cores do better. With several
    servers, each is assumed to have a machine of its own. gem-ctl simulate shows staleness and queue too, and knows workers
    of different speeds.

    Exit status: 1 if the run needs more than --server-memory on each server, however many there are.
    """
    measured = costs(options)
    described = setup(bool(server_memory), **options)
    click.echo(text.plan(plan(described, measured)))
    if server_memory:
        needed = servers_needed(described, server_memory)
        click.echo(text.servers_needed(needed, server_memory))
        if needed is None:
            sys.exit(1)
