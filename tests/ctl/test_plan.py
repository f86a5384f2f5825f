"""gem-ctl plan: what it predicts follows from what the server really keeps and sends."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import Range
from gem_api.region import create_region
from gem_api.rules import OPTIMIZERS, PROXIES, RULES
from gem_api.wire import FLOAT32
from gem_ctl.amounts import parameters
from gem_ctl.cli import main
from gem_ctl.planning.plan import PROCESS_BYTES, Costs, Setup, plan
from kit.core import make_core, start

P = 5_000
LAYOUT = Layout.of({"w": (P,)})
COSTS = Costs(by_reference=1e-3, by_network=2e-3, parameter=1e-6, byte=1e-7, conversion=1e-7)
SETUP = Setup(parameters=P, workers=3, compute_seconds=0.1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_memory_of_a_worker_is_what_the_core_holds_for_it(rule: str, overlap: bool) -> None:
    core = make_core(Hyperparameters(rule=rule))
    lease = core.leases.get(core.register("ann", LAYOUT, 0.0, overlap=overlap).lease_id)
    assert plan(replace(SETUP, rule=rule, overlap=overlap)).worker_bytes == lease.nbytes


KINDS = [
    *((rule, "momentum", "sgd") for rule in RULES),
    *(("gem", proxy, "sgd") for proxy in PROXIES),
    *((rule, "momentum", optimizer) for rule, row in RULES.items() if row.optimizers for optimizer in OPTIMIZERS),
]


@pytest.mark.parametrize(("logged", "average"), [(False, True), (True, False)])
@pytest.mark.parametrize(("rule", "proxy", "optimizer"), KINDS)
def test_the_memory_of_a_run_is_what_the_core_holds_but_for_filling_up_pages(
    rule: str, proxy: str, optimizer: str, logged: bool, average: bool
) -> None:
    options = "" if proxy == "momentum" else f"proxy={proxy}"
    settings = Hyperparameters(rule=rule, rule_options=options, optimizer=optimizer, average=0.9 * average)
    core = make_core(settings, logged=logged)
    (ann,) = start(core, ["ann"], LAYOUT)
    lease = core.leases.get(ann)
    region, descriptor = create_region(P)
    os.close(descriptor)
    core.memory.reserve_region()
    core.adopt_region(lease, region)
    kind: dict[str, Any] = {"rule": rule, "proxy": proxy, "optimizer": optimizer, "durability": "log" if logged else "snapshot"}
    kind["average"] = average
    planned = plan(replace(SETUP, workers=1, shared_memory=True, **kind))
    assert 0 <= planned.worker_bytes - lease.nbytes < 3 * 4096
    assert 0 <= planned.server_bytes - PROCESS_BYTES - core.memory.held < 3 * 4096


def test_the_bytes_of_a_commit_are_those_of_its_chunks_both_ways() -> None:
    framed = sum(map(len, FLOAT32.frames(empty(P))))
    assert 0 <= 2 * framed - plan(SETUP).commit_bytes < 50
    halves = plan(replace(SETUP, gradient_dtype="bfloat16", theta_dtype="bfloat16"))
    assert halves.commit_bytes == plan(SETUP).commit_bytes / 2
    assert plan(replace(SETUP, shared_memory=True)).bytes_per_second == 0


def test_the_rate_grows_with_the_workers_until_the_server_is_full() -> None:
    few, full = plan(SETUP, COSTS), plan(replace(SETUP, workers=1000), COSTS)
    assert few.commits_per_second == pytest.approx(3 / (0.1 + few.server_seconds))
    assert (full.commits_per_second, full.load) == pytest.approx((1 / full.server_seconds, 1))
    at = plan(replace(SETUP, workers=round(full.full_at)), COSTS)
    assert at.load == pytest.approx(1, rel=0.1)
    longer = plan(replace(SETUP, overlap=True), COSTS)
    assert longer.commits_per_second == pytest.approx(3 / 0.1), "a worker that overlaps waits for the longer of the two"
    once = plan(replace(SETUP, local_steps=4), COSTS)
    assert once.commits_per_second == pytest.approx(3 / (4 * 0.1 + few.server_seconds)), "one commit for all its steps"


@pytest.mark.parametrize(
    ("size", "count"),
    [("124M", 124_000_000), ("124m", 124_000_000), ("1B", 10**9), ("1.5b", 1_500_000_000), ("1G", 10**9)],
)
def test_sizes_are_written_as_people_write_them(size: str, count: int) -> None:
    assert parameters(size) == count


# -- several servers

LARGE = Setup(parameters=110_000_000, workers=100, compute_seconds=0.5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_memory_of_a_server_of_several_is_what_its_core_holds(count: int) -> None:
    parameters = 4096 * 6  # ranges of equal size
    core = make_core(Hyperparameters(), part=Range(0, count), logged=True)
    layout = Layout.of({"w": (parameters,)})
    leader = core.register("ann", layout, 0.0)
    planned = plan(Setup(parameters=parameters, workers=1, compute_seconds=0.1, servers=count))
    assert planned.worker_bytes == core.leases.get(leader.lease_id).nbytes
    assert planned.server_bytes - PROCESS_BYTES == (3 + 1) * 4 * parameters // count


def test_servers_share_the_time_of_a_commit_but_for_its_fixed_part() -> None:
    one, four = plan(LARGE, COSTS), plan(replace(LARGE, servers=4), COSTS)
    fixed = COSTS.by_network
    assert four.server_seconds - fixed == pytest.approx((one.server_seconds - fixed) / 4)
    round_trip = fixed + COSTS.parameter * LARGE.parameters / 4 + COSTS.byte * one.commit_bytes
    assert four.full_at == pytest.approx((0.5 + round_trip) / four.server_seconds)
    assert four.commits_per_second == pytest.approx(1 / four.server_seconds)
    assert (four.commit_bytes, four.worker_bytes) == (one.commit_bytes, one.worker_bytes / 4)


def run_plan(*options: str) -> str:
    return " ".join(CliRunner().invoke(main, ["plan", "--parameters", "110M", "--workers", "100", *options]).output.split())


def test_the_command_says_what_each_of_several_servers_needs() -> None:
    told = run_plan("--servers", "4")
    assert "server memory on each of 4, 714.5 MiB, and 209.8 MiB per worker" in told
    assert "839.2 MiB per commit, both ways, 209.8 MiB of them at each server" in told


def test_one_server_is_planned_as_before() -> None:
    assert run_plan("--servers", "1") == run_plan()
    assert "each" not in run_plan()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--shared-memory"], "--shared-memory does not reach"),
        (["--rule", "fedbuff"], "--rule fedbuff needs one server"),
        (["--rule", "gem:proxy=yellowfin"], "--rule gem:proxy=yellowfin needs one server"),
        (["--rule", "gem:proxy=yelowfin"], "the proxy of --rule gem is one of momentum"),
        (["--rule", "my:Own:a=1"], "--rule my:Own is your own: its costs are not known"),
        (["--parameters", "5000"], "5000 parameters are too few for 2 servers"),
    ],
)
def test_what_several_servers_can_not_do_is_refused_as_by_the_server(options: list[str], why: str) -> None:
    assert why in run_plan("--servers", "2", *options)
