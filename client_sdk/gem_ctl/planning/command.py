"""gem-ctl plan."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any

import click
from gem_api.process.option_types import Named, Number, Read, Whole
from gem_api.process.options import WithHeadings, option
from gem_api.ranges import MAX_RANGES
from gem_api.rules import PROXIES, RULES
from gem_api.wire_names import WIRE_NAMES

from gem_ctl.amounts import LINK_SPEED, PARAMETERS, WORKERS
from gem_ctl.planning.outcome import outcome
from gem_ctl.planning.plan import Setup, one_server_only, plan
from gem_ctl.planning.scenario import Scenario, Slow, workers_that_pay
from gem_ctl.planning.table import show

_MAX_FACTOR = 1000


def _slow(text: str) -> Slow:
    """A share of the workers, and how many times as long they compute: 10%:5."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%:(\d+(?:\.\d+)?)", text.strip())
    share, factor = (float(match[1]) / 100, float(match[2])) if match else (0.0, 0.0)
    if not (0 <= share <= 1 and 1 <= factor <= _MAX_FACTOR):
        raise ValueError(f"{text!r} is not a share of the workers and a factor from 1 to {_MAX_FACTOR}; write 10%:5")
    return Slow(share, factor)


# fmt: off
@click.command("plan", cls=WithHeadings, short_help="Predicts memory, network traffic, speed and staleness of a run.")
@option("--parameters", heading="Most used", type=PARAMETERS, required=True,
        help="Number of the model's parameters, for example 124M or 1B.")
@option("--compute-seconds", heading="Most used", type=Number(0, 1e6), default=0.1,
        help="Seconds for the forward and backward pass of one step.")
@option("--workers", heading="Most used", type=WORKERS, default="10",
        help="Number of workers; several with commas between them, such as 10,100,1k.")
@option("--batches", heading="Most used", type=Whole(1, 10**12), show_default="not known",
        help="Number of batches of the whole run: epochs × samples / batch size. For how long it takes, and how many workers "
             "it is long enough for.")
@option("--optimizer", heading="Most used", type=Named("optimizer"), default="sgd",
        help="The optimizer that the workers share on the server.")
@option("--servers", heading="Cluster", type=Whole(1, MAX_RANGES), default=1, help="Servers that hold a range of θ each.")
@option("--spread", heading="Cluster", type=Number(0, 1), default=0.1,
        help="Standard deviation of the time of a step, relative to its mean.")
@option("--slow", heading="Cluster", type=Read("share:factor", _slow), multiple=True,
        help="Slower workers: 10%:5 are a tenth that compute 5 times as long.")
@option("--shared-memory", heading="Network", is_flag=True,
        help="The workers run on the server's machine and share memory with it.")
@option("--overlap", heading="Network", is_flag=True, help="The workers compute while a commit is under way.")
@option("--bandwidth", heading="Network", type=LINK_SPEED, show_default="no limit",
        help="Bits per second of each machine's link, such as 10G.")
@option("--gradient-dtype", heading="Network", type=click.Choice(WIRE_NAMES), default="float32",
        help="Format of gradients on the network.")
@option("--theta-dtype", heading="Network", type=click.Choice(WIRE_NAMES), default="float32",
        help="Format of θ on the network.")
@option("--rule", heading="Rule", type=Named("rule"), default="gem",
        help="The update rule, as for gem-server, such as gem:proxy=adam.")
@option("--local-steps", heading="Steps of the workers", type=Whole(1, 10_000), default=1,
        help="Steps that a worker makes per commit.")
@click.option("--average", is_flag=True, help="The server keeps an average of θ.")
@click.option("--rtt", type=Number(0, 1e6), default=0.0, help="Seconds from a worker to a server and back.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def plan_run(
    workers: tuple[int, ...], spread: float, slow: tuple[Slow, ...], rtt: float, bandwidth: float | None, as_json: bool,
    batches: int | None, **options: Any,
) -> None:
    """Predicts what a run needs: the server's memory, the network traffic, and how many workers pay.

    For each number of workers it simulates the run in time: workers compute, send commits, wait in the server's queue and get
    answers. Nothing is trained. Staleness τ and the queue are counted in commits; "idle" is the share of the time in which
    workers do not compute; "further" is what one more worker of that speed brings, in gradients of whole batches per second.

    The costs of a commit were measured on two cores that server and workers share. More cores do better. With several
    servers, each is assumed to have a machine of its own.

    \b
    Examples:
      gem-ctl plan --parameters 25M --workers 10,100 --compute-seconds 0.3 --batches 20000
      gem-ctl plan --parameters 1M --slow 10%:5 --bandwidth 10G --rtt 0.02
    """
    if sum(group.share for group in slow) > 1 + 1e-9:
        raise click.UsageError("the shares of --slow are more than 100 % together")
    if options["shared_memory"] and (rtt or bandwidth):
        raise click.UsageError("shared memory has no network: leave out --shared-memory, or --rtt and --bandwidth")
    described = _setup(workers=workers[0], **options)
    scenario = Scenario(described, spread=spread, slow=slow, latency=rtt / 2, bandwidth=bandwidth or 0.0, batches=batches or 0)
    outcomes = [outcome(replace(scenario, setup=replace(described, workers=count))) for count in workers]
    if as_json:
        found = {"scenario": asdict(scenario), "plan": asdict(plan(described)), "workers_that_pay": workers_that_pay(scenario)}
        found["outcomes"] = list(map(asdict, outcomes))
        click.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        click.echo(show(scenario, outcomes))
# fmt: on


def _setup(rule: dict[str, Any], optimizer: dict[str, Any], **others: Any) -> Setup:
    """The setup that the options describe, which are its fields. Raises click.UsageError if no server would accept it."""
    options = {"rule": rule["rule"], "proxy": _proxy(rule), "optimizer": optimizer["optimizer"], **others}
    if options["rule"] not in RULES:
        raise click.UsageError(f"--rule {options['rule']} is your own: its costs are not known; choose from {', '.join(RULES)}")
    shared = options["optimizer"] not in ("sgd", "worker")
    if shared and not RULES[options["rule"]].optimizers:
        able = ", ".join(name for name, row in RULES.items() if row.optimizers)
        raise click.UsageError(f"--optimizer {options['optimizer']} works with --rule {able}")
    if shared and options["local_steps"] > 1:
        raise click.UsageError("a shared optimizer takes gradients: for --local-steps above 1 use --optimizer sgd or worker")
    described = Setup(**options)
    if described.servers > 1 and (why := one_server_only(described)):
        raise click.UsageError(why)
    return described


def _proxy(rule: dict[str, Any]) -> str:
    """The proxy among a rule's settings. Raises click.UsageError for an unknown one."""
    settings = dict(setting.split("=", 1) for setting in rule.get("rule_options", "").split())
    proxy = str(settings.get("proxy", "momentum"))
    if proxy not in PROXIES:
        raise click.UsageError(f"the proxy of --rule gem is one of {', '.join(PROXIES)}, not {proxy!r}")
    return proxy
