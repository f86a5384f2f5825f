"""gem-ctl plan: what it simulates follows from the events, and agrees with the closed form where that one is right."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from gem_ctl.planning.outcome import Outcome, outcome
from gem_ctl.planning.plan import Costs, Setup, plan
from gem_ctl.planning.scenario import FILLED, Scenario, Slow, speeds, times, workers_that_pay
from gem_ctl.planning.table import show
from hypothesis import given, settings
from hypothesis import strategies as st

NETWORK = Path(__file__).parents[2] / "docs/results/network.json"
COSTS = Costs(by_reference=1e-3, by_network=2e-3, parameter=1e-6, byte=1e-7, conversion=1e-7)
SETUP = Setup(parameters=5_000, workers=10, compute_seconds=0.1)  # a commit takes the server 11 ms
SECOND = Costs(by_reference=1.0, by_network=1.0, parameter=0.0, byte=0.0)  # a commit takes the server 1 s
NO_COSTS = Costs(by_reference=1e-6, by_network=1e-6, parameter=0.0, byte=0.0)


def simulated(setup: Setup = SETUP, costs: Costs = COSTS, **others: Any) -> Outcome:
    return outcome(Scenario(setup, costs, **others))


def fixed(workers: int, compute: float, **others: Any) -> Outcome:
    """Without spread, with a server that takes 1 s for a commit."""
    return simulated(Setup(parameters=1, workers=workers, compute_seconds=compute), SECOND, spread=0.0, **others)


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1 / 9), ("worker", 1 / 9), ("adamw", 1.0)])
def test_a_further_worker_brings_what_its_speed_is_worth(optimizer: str, rate: float) -> None:
    """In a run with shares it commits as often as the fast ones, each time a ninth of a batch."""
    setup = Setup(parameters=1, workers=2, compute_seconds=1.0, optimizer=optimizer, shared_memory=True)
    fast, slow = outcome(Scenario(setup, NO_COSTS, spread=0.0, slow=(Slow(0.5, 9.0),))).groups
    assert (fast.further, slow.further) == pytest.approx((1.0, 1 / 9), rel=1e-3)
    assert (fast.commits_per_second, slow.commits_per_second) == pytest.approx((1.0, rate), rel=0.01)


def test_a_further_worker_brings_nothing_to_a_full_server_and_a_slow_one_takes_from_the_others() -> None:
    assert fixed(3, 0.5).further == pytest.approx(0.0)
    setup = Setup(parameters=1, workers=8, compute_seconds=0.5, optimizer="adamw", shared_memory=True)
    fast, slow = outcome(Scenario(setup, SECOND, spread=0.0, slow=(Slow(0.5, 9.0),))).groups
    assert fast.further > 0.01 > -0.01 > slow.further, "its smaller commits take the turns of whole ones"


def test_two_workers_in_a_full_server() -> None:
    """A cycle of 2 s: half for the gradient, a half in the queue, one in the server."""
    two = fixed(2, 0.5)
    assert two.commits_per_second == pytest.approx(1.0)
    assert (two.load, two.idle, two.wait, two.round_trip) == pytest.approx((1.0, 0.75, 0.5, 1.5), rel=1e-3)
    assert two.queue_mean == pytest.approx(0.5, rel=1e-3)
    assert two.queue_max == 1
    assert (two.staleness.mean, two.staleness.max) == (1, 1)


@settings(max_examples=12)
@given(st.integers(2, 40), st.floats(0, 0.5), st.floats(0, 1), st.floats(0.2, 20), st.integers(0, 9))
def test_the_mean_staleness_is_the_number_of_the_other_workers(
    workers: int, compute: float, spread: float, factor: float, seed: int
) -> None:
    """Between two commits of a worker lie all those that others make in this time: each counts for each other one."""
    setup = replace(SETUP, workers=workers, compute_seconds=compute)
    of = outcome(Scenario(setup, COSTS, spread=spread, slow=(Slow(0.3, factor),)), seed)
    assert of.staleness.mean == pytest.approx(workers - 1, rel=0.02)


@settings(max_examples=12)
@given(st.integers(1, 60), st.floats(0, 0.5), st.floats(0, 1), st.booleans(), st.integers(1, 3))
def test_no_simulation_is_faster_than_the_closed_form(
    workers: int, compute: float, spread: float, overlap: bool, servers: int
) -> None:
    setup = Setup(parameters=20_000, workers=workers, compute_seconds=compute, overlap=overlap, servers=servers)
    of = simulated(setup, spread=spread)
    assert of.commits_per_second <= plan(setup, COSTS).commits_per_second * 1.02
    assert of.queue_mean == pytest.approx(of.commits_per_second * of.wait)  # Little's law
    assert 0 <= of.idle <= 1 >= of.load >= 0


# -- the closed form

SETUPS = [
    SETUP,
    replace(SETUP, overlap=True),
    replace(SETUP, local_steps=4),
    replace(SETUP, shared_memory=True),
    replace(SETUP, gradient_dtype="int8", theta_dtype="bfloat16"),
    Setup(parameters=40_000, workers=10, compute_seconds=0.5, servers=3),
    Setup(parameters=40_000, workers=10, compute_seconds=0.2, servers=3, overlap=True),
]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("fraction", [0.3, 10])
def test_the_simulation_agrees_with_the_closed_form_far_from_saturation(setup: Setup, fraction: float) -> None:
    workers = max(1, round(fraction * plan(setup, COSTS).full_at))
    planned = plan(replace(setup, workers=workers), COSTS)
    of = simulated(replace(setup, workers=workers), spread=0.1)
    assert of.commits_per_second == pytest.approx(planned.commits_per_second, rel=0.03)
    assert of.load == pytest.approx(planned.load, rel=0.03)
    assert of.server_bytes == planned.server_bytes


def test_the_sum_of_local_steps_varies_less_than_each_step() -> None:
    """Variances add up: of 4 steps, the mean is 4 times and the deviation twice that of one."""
    of = times(Scenario(replace(SETUP, workers=2, local_steps=4), spread=0.2, slow=(Slow(0.5, 3.0),)))
    assert of.compute == pytest.approx([0.4, 1.2])
    assert of.spread == pytest.approx(2 * 0.2 / 4)


@pytest.mark.parametrize(
    "given",
    [
        {"spread": 1.0}, {"slow": (Slow(0.5, 10.0),)}, {"latency": 0.05, "setup": SETUPS[2]},
        {"bandwidth": 2e6, "setup": SETUPS[5]},
    ],
    ids=str,
)  # fmt: skip
def test_workers_pay_until_further_ones_mostly_wait(given: dict[str, Any]) -> None:
    setup, more = given.get("setup", SETUP), {name: value for name, value in given.items() if name != "setup"}
    pays = workers_that_pay(Scenario(setup, COSTS, **more))
    few, all_, twice = (
        simulated(replace(setup, workers=count), **more).commits_per_second for count in (pays // 4, pays, 2 * pays)
    )
    assert all_ / pays > 0.75 * few / (pays // 4), "each brings nearly as many commits as one of few"
    assert twice < 1.35 * all_, "and as many again bring little"


@pytest.mark.parametrize(
    ("bandwidth", "said"),
    [
        (math.inf, "10 workers, 9.01 × as fast as a plain loop"),
        (5e4, "no number of workers: a plain loop is 5 × as fast as any number of them"),
    ],
)
def test_workers_who_are_slower_together_than_a_plain_loop_do_not_pay(bandwidth: float, said: str) -> None:
    """A gradient takes 0.1 s, and its 20,000 bytes 0.5 s of the server's link."""
    scenario = Scenario(SETUP, COSTS, bandwidth=bandwidth)
    assert said in show(scenario, [outcome(scenario)])


def test_one_worker_always_pays() -> None:
    assert workers_that_pay(Scenario(replace(SETUP, compute_seconds=0.0), COSTS)) == 1


# -- mixed speeds


@pytest.mark.parametrize(
    ("workers", "slow", "counts"),
    [
        (10, (), {1: 10}),
        (10, (Slow(0.1, 5),), {1: 9, 5: 1}),
        (3, (Slow(0.5, 2), Slow(0.5, 3)), {2: 2, 3: 1}),
        (1000, (Slow(0.1, 5), Slow(0.015, 20)), {1: 885, 5: 100, 20: 15}),
        (4, (Slow(0.01, 5),), {1: 4}),
        (4, (Slow(0.25, 5), Slow(0.25, 5)), {1: 2, 5: 2}),
    ],
)
def test_shares_are_rounded_to_whole_workers(workers: int, slow: tuple[Slow, ...], counts: dict[float, int]) -> None:
    assert speeds(Scenario(replace(SETUP, workers=workers), slow=slow)) == counts


def test_slow_workers_are_more_stale_and_commit_less() -> None:
    of = simulated(replace(SETUP, workers=5, compute_seconds=10.0), slow=(Slow(0.2, 4.0),))
    fast, slow = of.groups
    assert (fast.workers, slow.workers) == (4, 1)
    assert fast.commits_per_second == pytest.approx(4 * 4 * slow.commits_per_second, rel=0.02)
    assert fast.staleness is not None
    assert slow.staleness is not None
    assert slow.staleness.mean == pytest.approx(4 * 4, rel=0.02)
    assert fast.staleness.mean == pytest.approx(3.25, rel=0.02), "three fast ones, and a quarter of the slow one"
    assert sum(group.commits_per_second for group in of.groups) == pytest.approx(of.commits_per_second)


def test_a_simulation_that_is_too_short_for_the_slowest_says_so() -> None:
    scenario = Scenario(replace(SETUP, workers=100), COSTS, slow=(Slow(0.01, 100.0),))
    assert not outcome(scenario, max_commits=1000).settled
    assert outcome(scenario).settled


# -- the network


def test_latency_adds_to_the_cycle_and_the_link_limits_the_rate() -> None:
    setup = replace(SETUP, workers=1)
    up = down = plan(setup, COSTS).commit_bytes / 2
    cycle = 1 / plan(setup, COSTS).commits_per_second
    far = simulated(setup, spread=0.0, latency=0.25, bandwidth=up / FILLED)
    assert far.commits_per_second == pytest.approx(1 / (cycle + 2 * 0.25 + (up + down) / up))
    crowded = simulated(replace(SETUP, workers=1000), bandwidth=up / FILLED)
    assert crowded.commits_per_second == pytest.approx(1.0, rel=0.01), "a link that carries one commit a second"
    assert crowded.load < 0.02


def measured_on_a_link() -> dict[tuple[int, float, int, str], list[float]]:
    """Commits a second that `python -m benchmarks.network` measured on 1 Gbit/s, without compute, by parameters, round trip,
    workers and format, in the runs that the model was made for. docs/results/network.md has how far it is from later ones."""
    codes: dict[str, dict[tuple[int, float, int, str], list[float]]] = {}
    for row in json.loads(NETWORK.read_text()):
        kind = row["parameters"], row["rtt"], row["workers"], row["gradient"]
        codes.setdefault(row["code"], {}).setdefault(kind, []).append(row["rate"])
    return codes["one turn at a time"] | codes["turns"]  # if both were measured, the newer counts


@pytest.mark.parametrize(("kind", "rates"), measured_on_a_link().items(), ids=str)
def test_a_link_of_1_gbit_s_carries_what_was_measured(kind: tuple[int, float, int, str], rates: list[float]) -> None:
    parameters, rtt, workers, form = kind
    setup = Setup(parameters, workers, compute_seconds=0.0, gradient_dtype=form, theta_dtype=form)
    of = outcome(Scenario(setup, spread=0.0, latency=rtt / 2, bandwidth=125e6), max_commits=1000)
    within = 0.4 if rtt == 0.1 else 0.15  # the server tries for a while how many fill such a network
    assert of.commits_per_second == pytest.approx(median(rates), rel=within)


def test_a_run_takes_the_time_in_which_the_simulated_commits_bring_its_batches() -> None:
    setup = Setup(parameters=5_000, workers=8, compute_seconds=0.1, optimizer="adamw")
    found = simulated(setup, slow=(Slow(0.5, 4.0),), batches=10_000)
    fast, slow = found.groups
    assert slow.commits_per_second == pytest.approx(fast.commits_per_second, rel=0.1), "their batches are a quarter"
    assert found.run_seconds == pytest.approx(10_000 / (fast.commits_per_second + slow.commits_per_second / 4), rel=0.05)
    local = simulated(replace(SETUP, local_steps=4), batches=10_000)
    assert local.run_seconds == pytest.approx(10_000 / (4 * local.commits_per_second))


def test_servers_have_a_link_each() -> None:
    setup = Setup(parameters=40_000, workers=1000, compute_seconds=0.1)
    up = plan(setup, COSTS).commit_bytes / 2
    for servers in (1, 4):
        crowded = simulated(replace(setup, servers=servers), bandwidth=up / FILLED)
        assert crowded.commits_per_second == pytest.approx(servers, rel=0.01)


def test_shared_memory_has_no_network() -> None:
    near = replace(SETUP, shared_memory=True)
    assert simulated(near, latency=10.0, bandwidth=1.0) == simulated(near)
