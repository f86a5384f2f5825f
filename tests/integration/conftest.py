"""The worker that most of these tests look at; a module with another idea of a session has its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gem_client import Session, connect
from integration.helpers import GRADIENT, model
from live import Live


@pytest.fixture
def session(live: Live) -> Iterator[Session]:
    """A worker called alice with one commit."""
    with connect(live.address, name="alice") as joined:
        joined.join(model())
        joined.commit(GRADIENT, loss=1.25, samples=8)
        yield joined
