"""Shared fixtures of the SDK's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gem_client import Session, connect
from live import Live
from region_client import abstract, linux_only
from session_helpers import model


@pytest.fixture
def session(live: Live) -> Iterator[Session]:
    """A session that has joined the run of `live`, and shares memory if the server does."""
    with connect(live.address) as joined:
        joined.join(model())
        assert joined.shares_memory == bool(live.config.memory_socket)
        yield joined


@pytest.fixture(params=["network", pytest.param("shared memory", marks=(linux_only, pytest.mark.shared_memory))])
def memory_socket(request: pytest.FixtureRequest) -> str:
    """Runs a test over both transports: the `memory_socket` of the server's configuration, empty for the network."""
    return "" if request.param == "network" else abstract()
