"""Measures the cost of the fused kernel's statistics, of a shared optimizer, and the gain from threads:
`python -m benchmarks.server.fused_pass`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import numpy as np
from gem_api.layout import Layout
from gem_server.rules import RuleInput, Shared, make_rule
from gem_server.rules.bins import bin_edges
from gem_server.rules.fused import BINS, BLOCK, SGD, _delta, _reply, _take, gem_part
from gem_server.rules.gem import Gem
from gem_server.rules.proxies import Displacement
from gem_server.rules.threads import Threads
from numba import njit

from benchmarks.lib.measuring import measurement


@njit(nogil=True, error_model="numpy", cache=True)
def bare_pass(theta, gradient, moment, snapshot, answer, settings):  # type: ignore[no-untyped-def]
    """m, π, θ, s and the answer alone, in the same blocks: no energies, no histogram, and π is not kept."""
    block = np.empty(BLOCK, np.float32)
    scalars = (settings[0], settings[1], settings[2], settings[3], settings[4], settings[5], settings[6], settings[7])
    for low in range(np.uint64(0), np.uint64(theta.size), np.uint64(BLOCK)):
        high = min(low + np.uint64(BLOCK), np.uint64(theta.size))
        _take(gradient, low, high, block)
        _bare_update(theta, block, moment, snapshot, low, high, scalars)
        _reply(theta, answer, low, high)


@njit(nogil=True, error_model="numpy", cache=True)
def _bare_update(theta, block, moment, snapshot, begin, end, settings):  # type: ignore[no-untyped-def]
    eta, mu, own, kappa, inside, outside, pi_max, limit = settings
    for i in range(begin, end):
        delta = _delta(block[i - begin], eta, limit)
        m = mu * moment[i] + own * delta
        factor = (kappa * abs(m) - abs(theta[i] - snapshot[i])) / (abs(delta + inside) + outside)
        factor = factor if factor > np.float32(0) else np.float32(0)
        factor = factor if factor < pi_max else pi_max
        after = theta[i] + factor * delta
        moment[i] = m
        theta[i] = after
        snapshot[i] = after


@measurement(parameters=(156_450, 1_000_000, 25_000_000), seconds=3.0)
@click.option("--tensors", type=int, default=2, help="Tensors that the parameters are divided into.")
@click.option("--threads", multiple=True, type=int, default=(2,), help="Numbers of threads.")
@click.option("--optimizer", "optimizers", multiple=True, help="A shared optimizer, whose commit is measured too.")
@click.option("--answer/--no-answer", default=False, help="Whether θ is also written to a worker's reply buffer.")
def main(
    parameters: tuple[int, ...], tensors: int, threads: tuple[int, ...], optimizers: tuple[str, ...], answer: bool,
    seconds: float,
) -> None:  # fmt: skip
    """Interleaves the bare pass, the pass with statistics, and everything that a rule does for a commit, in one thread and in
    several. Prints medians and minima; on a busy machine, compare the minima."""
    click.echo("        P  pass         median ms    least ms   ÷ bare: median   least")
    for size in parameters:
        passes = _passes(size, tensors, threads, answer) | {name: _commit(size, name) for name in optimizers}
        times = times_of(passes, seconds)
        bare = times["bare"]
        for name, taken in times.items():
            median, least = statistics.median(taken), min(taken)
            ratios = f"{median / statistics.median(bare):16.2f} {least / min(bare):7.2f}"
            click.echo(f"{size:9d}  {name:10s} {1e3 * median:11.4f} {1e3 * least:11.4f} {ratios}")


def _passes(size: int, tensors: int, threads: tuple[int, ...], answer: bool) -> dict[str, Callable[[], object]]:
    """The passes to compare, by name. All work on the same arrays."""
    random = np.random.default_rng(0)
    theta, gradient, moment = (random.normal(size=size).astype(np.float32) for _ in range(3))
    buffers = {"moment": moment, "snapshot": theta + random.normal(size=size, scale=0.5).astype(np.float32)}
    if answer:
        buffers["answer"] = np.empty(size, np.float32)
    bounds = np.linspace(0, size, tensors + 1, dtype=int)
    layout = Layout.of({str(number): (int(extent),) for number, extent in enumerate(np.diff(bounds))})
    rule = Gem()
    settings = np.array(rule._scalars(rule.learning_rate, Displacement(moment, rule.momentum)), np.float32)
    nothing = np.empty(0, np.float32)
    arrays = (theta, gradient, moment, buffers["snapshot"], buffers.get("answer", nothing))
    optimizer = (SGD, nothing, np.float32(0), np.float32(0))
    results = (
        np.empty((1, 3, BINS), np.int64), np.empty((1, 2), np.int64), np.zeros(tensors, np.float32), np.empty((1, 2)),
    )  # fmt: skip

    def split(count: int) -> Callable[[], object]:
        rule = Gem()
        rule.use_threads(Threads(count, least=1))
        return lambda: rule.apply(layout, theta, gradient, buffers, RuleInput(0))

    part = (*arrays[:3], nothing, *arrays[3:], layout.offsets, layout.factors, bin_edges(rule.pi_max), settings, *optimizer)
    return {
        "bare": lambda: bare_pass(*arrays, settings),
        "pass": lambda: gem_part(0, 1, *part, True, True, *results),
        "rule": split(1),
        **{f"{count} threads": split(count) for count in threads},
    }


def _commit(size: int, optimizer: str) -> Callable[[], object]:
    """A commit around a shared optimizer, on arrays of its own."""
    random, layout = np.random.default_rng(0), Layout.of({"theta": (size,)})
    rule = make_rule("gem", optimizer=optimizer, learning_rate=1e-3, weight_decay=0.01)
    theta, gradient = (random.normal(size=size).astype(np.float32) for _ in range(2))
    buffers = {each: np.zeros(size, np.float32) for each in rule.buffers}
    shared = Shared({each: np.zeros(size, np.float32) for each in rule.shared}, dict(rule.numbers))
    rule.first_pull(theta, buffers)
    return lambda: rule.apply(layout, theta, gradient, buffers, RuleInput(0, 10, shared=shared))


def times_of(passes: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call. The passes alternate, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for name, run in passes.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
