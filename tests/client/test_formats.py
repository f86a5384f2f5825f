"""Sessions that send tensors in other formats than float32."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gem_api.wire import wire_format
from gem_client import InvalidRequest, NonFiniteGradient, connect
from kit.model import PLAIN, SIZE, Array, model, outcomes, theta
from kit.server import config, serving

RATE = PLAIN.learning_rate
GRADIENT: Array = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)


def rounded(values: Array) -> Array:
    """The values as they are after a journey in bfloat16, according to PyTorch."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def test_a_gradient_is_applied_as_its_format_has_it() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="bfloat16") as session:
        first = session.join(model()).copy()
        session.commit(GRADIENT)
        np.testing.assert_array_equal(theta(live), first - np.float32(RATE) * rounded(GRADIENT))


def test_parameters_come_as_their_format_has_them_and_stay_exact_on_the_server() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, theta_dtype="bfloat16") as session:
        session.join(model())
        answer = session.commit(GRADIENT)
        exact = theta(live)
        assert not np.array_equal(exact, rounded(exact))
        np.testing.assert_array_equal(answer.theta, rounded(exact))
        np.testing.assert_array_equal(session.pull(), rounded(exact))


def test_what_int8_rounds_away_comes_with_later_commits() -> None:
    """Error feedback: an element far smaller than its block's largest would never be heard of without it."""
    gradient = np.full(SIZE, 1e-3, np.float32)
    gradient[0] = 1.0
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8") as session:
        first = session.join(model()).copy()
        for _ in range(100):
            session.commit(gradient)
        moved = (first - theta(live)) / RATE
        np.testing.assert_allclose(moved, 100 * gradient, atol=1 / 127)


def test_the_conversion_is_compiled_before_the_first_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes about a second, in which others would wait for the commit."""
    form = wire_format("int8")
    prepared = Mock()
    monkeypatch.setattr(type(form), "prepare", prepared)
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8", shared_memory=False) as session:
        session.join(model())
        prepared.assert_called_with()


def test_a_gradient_that_was_refused_leaves_no_trace_in_the_next() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8") as session:
        first = session.join(model()).copy()
        with pytest.raises(NonFiniteGradient):
            session.commit(np.full(SIZE, np.nan, np.float32))
        session.commit(np.ones(SIZE, np.float32))
        np.testing.assert_array_equal(theta(live), first - np.float32(RATE))
        assert outcomes(live) == {"applied": 1, "rejected": 1}


@pytest.mark.parametrize("wrong", [{"gradient_dtype": "float16"}, {"theta_dtype": ""}])
def test_a_format_that_does_not_exist_is_refused_with_those_that_do(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=r"float32.*bfloat16"):
        connect("127.0.0.1:1", **wrong)  # type: ignore[arg-type]
