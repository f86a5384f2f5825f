"""Compiles the update pass early: when a server starts, and by `python -m gem_server.warm_up` when an image is built."""

from __future__ import annotations

import numpy as np
from gem_api.layout import Layout
from gem_api.rules import RULES
from gem_api.wire import BFLOAT16

from gem_server.core.norm_bound import sum_of_squares
from gem_server.rules import RuleInput, Shared, UpdateRule, make_rule
from gem_server.rules.average import follow
from gem_server.rules.fused import all_within


def warm_up(rule: UpdateRule) -> None:
    """Compiles the rule's pass and the wire formats, or loads them from numba's cache, so that no worker waits for that."""
    layout = Layout.of({"warm-up": (1,)})
    theta, gradient = np.zeros(1, np.float32), np.zeros(1, np.float32)
    buffers = {name: np.zeros(1, np.float32) for name in rule.buffers}
    shared = Shared({name: np.zeros(1, np.float32) for name in rule.shared}, dict(rule.numbers))
    rule.apply(layout, theta, gradient, buffers, RuleInput(0, shared=shared))
    all_within(gradient, np.float32(1))
    sum_of_squares(gradient)
    follow(rule.threads, theta, gradient, 0.5)
    BFLOAT16.prepare()


if __name__ == "__main__":
    for rule in RULES:
        warm_up(make_rule(rule))
