"""The linear model of many workers: when it is stable."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.many_workers.stability import gamma_times, stable_below, uniform_times


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_workers_in_lockstep_are_as_stable_as_momentum_sgd_on_one_machine(momentum: float) -> None:
    assert stable_below(gamma_times(0.01), momentum) == pytest.approx(2 * (1 + momentum), rel=0.01)
    assert stable_below(uniform_times(0.01), momentum) == pytest.approx(2 * (1 + momentum), rel=0.01)


def test_the_limit_rises_with_the_spread_until_all_is_stable() -> None:
    limits = [stable_below(gamma_times(spread), 0.9) for spread in (0.1, 0.3, 0.4, 0.5, 0.6, 1.0)]
    assert limits == sorted(limits)
    assert limits[-2] > 3 * limits[0]
    assert limits[-1] == np.inf


@pytest.mark.parametrize("times", [gamma_times(0.5), uniform_times(0.9), gamma_times(0.05)])
def test_the_limit_is_a_root_on_the_border(times: object) -> None:
    """At the limit (1 − φ)(1 − μφ) + kφ is zero for some oscillation; at 0.9 and 1.1 of it, for none."""

    def nearest(k: float) -> float:
        phi = times(1j * np.linspace(0.1, 60, 2_000_000))  # type: ignore[operator]
        return float(np.abs((1 - phi) * (1 - 0.9 * phi) + k * phi).min())

    limit = stable_below(times, 0.9)  # type: ignore[arg-type]
    assert nearest(limit) < 1e-3
    assert min(nearest(0.9 * limit), nearest(1.1 * limit)) > 10 * nearest(limit)
