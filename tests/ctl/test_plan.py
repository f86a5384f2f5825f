"""gem-ctl plan: what it predicts follows from what the server really keeps and sends."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from click.testing import CliRunner
from core_helpers import make_core, start
from gem_api.framing import chunk_frames, empty
from gem_api.hyperparameters import OPTIMIZERS, RULES, Hyperparameters
from gem_api.layout import Layout
from gem_api.region import create_region
from gem_client.ctl.cli import Count, main
from gem_client.ctl.plan import PROCESS_BYTES, PROXIES, SHARED_OPTIMIZER_RULES, Costs, Setup, plan

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


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize(("rule", "proxy"), [*((rule, "momentum") for rule in RULES), *(("gem", proxy) for proxy in PROXIES)])
def test_the_memory_of_a_run_is_what_the_core_holds_but_for_filling_up_pages(rule: str, proxy: str, logged: bool) -> None:
    core = make_core(Hyperparameters(rule=rule, rule_options=f"proxy={proxy}" if rule == "gem" else ""), logged=logged)
    (ann,) = start(core, ["ann"], LAYOUT)
    lease = core.leases.get(ann)
    region, descriptor = create_region(P)
    os.close(descriptor)
    core.memory.reserve_region()
    core.adopt_region(lease, region)
    planned = plan(
        replace(SETUP, workers=1, rule=rule, proxy=proxy, shared_memory=True, durability="log" if logged else "snapshot")
    )
    assert 0 <= planned.worker_bytes - lease.nbytes < 3 * 4096
    assert 0 <= planned.server_bytes - PROCESS_BYTES - core.memory.held < 3 * 4096


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", SHARED_OPTIMIZER_RULES)
def test_the_memory_of_an_optimizer_is_what_the_core_holds(rule: str, optimizer: str) -> None:
    core = make_core(Hyperparameters(rule=rule, optimizer=optimizer))
    (ann,) = start(core, ["ann"], LAYOUT)
    planned = plan(replace(SETUP, workers=1, rule=rule, optimizer=optimizer))
    assert planned.worker_bytes == core.leases.get(ann).nbytes
    assert planned.server_bytes - PROCESS_BYTES == core.memory.held


def test_the_bytes_of_a_commit_are_those_of_its_chunks_both_ways() -> None:
    framed = sum(map(len, chunk_frames(empty(P))))
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


def test_a_worker_that_overlaps_waits_for_the_longer_of_the_two() -> None:
    assert plan(replace(SETUP, overlap=True), COSTS).commits_per_second == pytest.approx(3 / 0.1)


def test_the_command_says_what_the_plan_says() -> None:
    done = CliRunner().invoke(main, ["plan", "--parameters", "25M", "--workers", "100", "--compute-seconds", "0.5"])
    assert done.exit_code == 0
    assert "28.16 GiB, of which 286.1 MiB per worker" in done.stdout
    assert "190.7 MiB per commit" in done.stdout


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("124M", 124_000_000), ("124m", 124_000_000), ("1B", 10**9), ("1.5b", 1_500_000_000), ("1G", 10**9)],
)
def test_sizes_are_written_as_people_write_them(size: str, parameters: int) -> None:
    assert Count().convert(size, None, None) == parameters


def test_a_worker_with_local_steps_commits_once_for_all_of_them() -> None:
    few, seconds = plan(replace(SETUP, local_steps=4), COSTS), plan(SETUP, COSTS).server_seconds
    assert few.commits_per_second == pytest.approx(3 / (4 * 0.1 + seconds))
    options = ["plan", "--parameters", "1B", "--workers", "1", "--compute-seconds", "1", "--local-steps", "100"]
    planned = plan(Setup(parameters=10**9, workers=1, compute_seconds=1.0, local_steps=100))
    assert f"{planned.commits_per_second:.4g}/s" in CliRunner().invoke(main, options).stdout


@pytest.mark.parametrize("size", ["0", "x", "-5", "1e3", "25q", "2000T", ""])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    done = CliRunner().invoke(main, ["plan", "--parameters", size])
    assert done.exit_code == 2
    assert "not a number of parameters" in done.stderr


def test_a_shared_optimizer_with_local_steps_is_refused_as_by_the_server() -> None:
    told = CliRunner().invoke(main, ["plan", "--parameters", "1M", "--optimizer", "adamw", "--local-steps", "8"])
    assert told.exit_code == 2
    assert "use --optimizer sgd or worker" in " ".join(told.output.split())


def test_a_shared_optimizer_under_a_rule_that_takes_none_is_refused_as_by_the_server() -> None:
    told = CliRunner().invoke(main, ["plan", "--parameters", "1M", "--optimizer", "adamw", "--rule", "dcasgd"])
    assert told.exit_code == 2
    assert f"works with --rule {', '.join(SHARED_OPTIMIZER_RULES)}" in " ".join(told.output.split())
