"""Shared fixtures of the SDK's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gem_client import Session, connect
from live import Live
from region_client import linux_only
from session_helpers import model


class Way(NamedTuple):
    """How commits travel: `transport` as the status names it, and the server's `settings` for it."""

    transport: str
    settings: dict[str, Any]

    @property
    def shares_memory(self) -> bool:
        return self.transport == "memory"


@pytest.fixture
def session(live: Live) -> Iterator[Session]:
    """A session that has joined the run of `live`, and shares memory if the server does."""
    with connect(live.address) as joined:
        joined.join(model())
        assert joined.shares_memory == bool(live.config.memory_socket)
        yield joined


@pytest.fixture(params=["grpc", "tcp", pytest.param("memory", marks=linux_only)])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    """Runs a test over gRPC, the lane over TCP, and the lane with shared memory."""
    settings = {
        "grpc": {"lane_listen": "", "memory_socket": ""},
        "tcp": {"memory_socket": ""},
        "memory": {"memory_socket": str(tmp_path / "lane")},
    }
    return Way(request.param, settings[request.param])
