"""The table of planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: list[Any] = []


def planted(servers: int, seed: int = 0) -> Callable[[Plant], Plant]:
    """Adds a bug to the table.

    Args:
        servers: How many servers there are.
        seed: The one that found it, tried first. After a change of the simulation another may find it.
    """

    def add(plant: Plant) -> Plant:
        BUGS.append(pytest.param(plant, servers, seed, id=plant.__name__))
        return plant

    return add
