"""The memory that each rule takes, as in docs/rules.md: counted, and compared with the limit before it is allocated."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.rules import PROXIES, RULES, RuleRow
from gem_server.durability.capture import copies_at_most
from kit.core import SMALL, commit, header, make_core, start, uploaded

BYTES = 4 * SMALL.size
CASES = [
    *((rule, "", row) for rule, row in RULES.items()), *(("gem", f"proxy={proxy}", row) for proxy, row in PROXIES.items()),
    ("dcasgd", "mean_square=0.9", replace(RULES["dcasgd"], shared=("mean_square",))),
    ("fedbuff", "buffer_size=1", RULES["fedbuff"]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "options", "row"), CASES)
def test_memory_is_what_the_rule_keeps(rule: str, options: str, row: RuleRow) -> None:
    each, shared, made = len(row.each), len(row.shared), row.temporaries
    settings = Hyperparameters(rule=rule, rule_options=options)
    core = make_core(settings)
    start(core, ["ann", "bob", "cy"])
    assert core.memory.most_for_worker == BYTES * each  # besides the gradient that arrives
    assert core.memory.held == BYTES * (1 + shared + made + 3 * (each + 1))
    assert copies_at_most(core) == 1 + shared + 3 * each
    held = [core.central.theta, *core.shared.buffers.values()]
    for lease in core.leases.live.values():
        held += lease.buffers.values()
    assert sum(array.nbytes for array in held) == core.memory.held - BYTES * (made + 3)


@pytest.mark.parametrize(("rule", "options", "row"), CASES)
def test_a_commit_takes_no_more_memory_than_is_counted(rule: str, options: str, row: RuleRow) -> None:
    """Two commits, for some rules do more in every second one."""
    size = 200_000
    layout = Layout.of({"w": (size,)})
    core = make_core(Hyperparameters(rule=rule, rule_options=options))
    (ann,) = start(core, ["ann"], layout, theta=np.float32(1))
    commit(core, ann, 1, 0.5)  # compiles what is compiled
    for sequence in (2, 3):
        lease = core.leases.get(ann)
        step = core.begin(core.ticket(lease, header(core, ann, sequence), 0.0, uploaded(core, 0.5)))
        tracemalloc.start()
        pi = step.run()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        core.finish(step, pi, 0.0)
        assert peak < 4 * size * (row.temporaries + 0.5)
