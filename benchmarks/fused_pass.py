"""What the statistics cost: the fused pass with and without them, beside a whole commit: `python -m benchmarks.fused_pass`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from gem_api.layout import Layout
from gem_server.rules.fused import BLOCK, _update
from gem_server.rules.gem import Gem
from numba import njit

from benchmarks.processes import measure, server


@njit(nogil=True, error_model="numpy", cache=True)
def bare_pass(theta, gradient, moment, snapshot, scalars):  # type: ignore[no-untyped-def]
    """m, π, θ and s alone: the same update in the same blocks, no statistics."""
    eta, mu, kappa, inside, outside, pi_max = scalars
    pi = np.empty(BLOCK, np.float32)
    for begin in range(0, theta.size, BLOCK):
        end = min(begin + BLOCK, theta.size)
        _update(
            theta[begin:end], gradient[begin:end], moment[begin:end], snapshot[begin:end], pi[: end - begin],
            eta, mu, kappa, inside, outside, pi_max,
        )  # fmt: skip
        snapshot[begin:end] = theta[begin:end]


@click.command()
@click.option("--parameters", multiple=True, type=int, default=(156_450, 25_000_000), show_default=True)
@click.option("--repeats", type=int, default=15, show_default=True)
def main(parameters: tuple[int, ...], repeats: int) -> None:
    """Interleaves both passes, then times whole commits of one session; medians."""
    click.echo("        P   bare ms   full ms   full/bare  commit ms  statistics' share of a commit")
    for size in parameters:
        bare, full = _times(size, repeats)
        with server() as (address, _):
            commit = float(np.median(measure(address, size, 1, 5.0).latencies))
        share = 100 * (full - bare) / commit
        click.echo(f"{size:9d} {1e3 * bare:9.3f} {1e3 * full:9.3f} {full / bare:11.2f} {1e3 * commit:10.2f} {share:9.1f} %")


def _times(size: int, repeats: int) -> tuple[float, float]:
    random = np.random.default_rng(0)
    theta, gradient, moment = (random.normal(size=size).astype(np.float32) for _ in range(3))
    snapshot = theta + random.normal(size=size, scale=0.5).astype(np.float32)
    rule, layout = Gem(), Layout.of({"a": (size // 3,), "b": (size - size // 3,)})
    scalars = tuple(np.float32(value) for value in (0.05, 0.9, 1.0, 0.0, 1e-16, 5.0))
    buffers = {"moment": moment, "snapshot": snapshot}
    passes: list[Callable[[], Any]] = [
        lambda: bare_pass(theta, gradient, moment, snapshot, scalars),
        lambda: rule.apply(layout, theta, gradient, buffers, 0),
    ]
    times: list[list[float]] = [[], []]
    for round_ in range(repeats + 1):
        for run, taken in zip(passes, times, strict=True):
            began = time.perf_counter()
            run()
            if round_:
                taken.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
