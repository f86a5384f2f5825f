"""Shared fixtures of the SDK's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gem_client import Session, connect
from kit.model import GRADIENT, Patience, Wire, model
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving


class Transport(NamedTuple):
    """How commits travel: its `name` in the status, and the server's `settings` for it."""

    name: str
    settings: dict[str, Any]

    @property
    def is_memory(self) -> bool:
        return self.name == "memory"

    @property
    def of_ranges(self) -> dict[str, Any]:
        """The settings of several servers, each of which has a memory socket of its own."""
        return {"memory": self.is_memory, **{name: value for name, value in self.settings.items() if name != "memory_socket"}}


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    """A server for the test's `transport`; without one, it shares memory in tests marked `shared_memory`."""
    settings: dict[str, Any] = {
        "memory_socket": abstract() if request.node.get_closest_marker("shared_memory") is not None else ""
    }
    if "transport" in request.fixturenames:
        settings = request.getfixturevalue("transport").settings
    with serving(config(**settings)) as server:
        yield server


@pytest.fixture
def session(live: Live) -> Iterator[Session]:
    """A session that has joined the run of `live`, and shares memory if the server does."""
    with connect(live.address) as joined:
        joined.join(model())
        assert joined.shares_memory == bool(live.config.memory_socket)
        yield joined


@contextmanager
def trained(live: Live, patience: Patience, **settings: Any) -> Iterator[tuple[Wire, Session]]:
    """A session with one commit, behind a network that can be broken."""
    with Wire(live.address, live) as wire, connect(wire.address, retry=patience.retry(), **settings) as session:
        session.join(model())
        session.commit(GRADIENT)
        yield wire, session


@pytest.fixture(params=["grpc", "tcp", pytest.param("memory", marks=linux_only)])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    """Runs a test over gRPC, over the lane's TCP port, and through shared memory."""
    settings = {
        "grpc": {"lane_listen": "", "memory_socket": ""},
        "tcp": {"memory_socket": ""},
        "memory": {"memory_socket": str(tmp_path / "lane")},
    }
    return Transport(request.param, settings[request.param])
