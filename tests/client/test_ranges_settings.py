"""Sessions with several servers that are restarted one by one with other hyper-parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client.range_helpers import GRADIENT, Ranges, large_model, ranges
from gem_client import SettingsDiffer, connect
from kit.model import PLAIN, Patience, in_background, version
from kit.server import DEADLINE, wait_until


def changed(run: Ranges, index: int, **changes: Any) -> None:
    """Restarts one server with these hyper-parameters."""
    run.lives[index].stop()
    run.back(index, hyperparameters=replace(PLAIN, **changes), given=frozenset(changes))


@pytest.mark.parametrize(("order", "changes"), [((0, 1), {"learning_rate": 0.25}), ((1, 0), {"epochs": 7})], ids=str)
def test_a_worker_that_registers_while_servers_are_restarted_one_by_one_waits(
    order: tuple[int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    patience = Patience()
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address, retry=patience.retry()) as session:
        with connect(run.address) as first:
            first.join(large_model())
            first.commit(GRADIENT)
        changed(run, order[0], **changes)
        joining = in_background(lambda: session.join(large_model()))
        wait_until(lambda: patience.pauses, "the worker to wait")
        assert not joining.done()
        changed(run, order[1], **changes)
        joining.result(DEADLINE)
        assert session.commit(GRADIENT).version == 2
        assert run.each(version) == [2, 2]


def test_servers_that_stay_different_are_named_with_what_differs(tmp_path: Path) -> None:
    patience = Patience()
    patience.run_out()
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address, retry=patience.retry()) as session:
        with connect(run.address) as first:
            first.join(large_model())
        changed(run, 1, learning_rate=0.25)
        with pytest.raises(SettingsDiffer) as error:
            session.join(large_model())
        text = f"range 1/2 at {run.lives[1].address}: .*learning_rate 0.5 there, 0.25 here.*; range 0 is at {run.address}"
        assert re.fullmatch(text, str(error.value))
        assert patience.pauses
