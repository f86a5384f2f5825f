"""Fixtures of the wire tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import Live
from wire_client import Wire, Worker, wired


@pytest.fixture
def wire(live: Live) -> Iterator[Wire]:
    """A raw client of the default server."""
    with wired(live) as client:
        yield client


@pytest.fixture
def worker(wire: Wire) -> Worker:
    """A worker that has initialised θ and pulled it."""
    return wire.started("worker")
