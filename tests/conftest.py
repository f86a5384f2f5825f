"""Shared fixtures."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from gem_client import Session, connect
from hypothesis import settings
from kit.model import GRADIENT, model
from kit.raw_client import Wire, Worker
from kit.regions import abstract
from kit.server import Live, config, serving
from kit.ways import wired

# The clock is no part of a test: no deadlines, and the same examples on every run.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def quiet_logs() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(autouse=True, scope="session")
def hear_ctrl_c() -> None:
    """Restores Ctrl-C: a shell makes background jobs ignore it, and the processes that tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def keep_signal_handlers(hear_ctrl_c: None) -> Iterator[None]:
    """Undoes what a command that a test runs in this process did to the signals, or a later test would meet its handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None:  # None is a library's own, from outside Python
            signal.signal(number, handler)


@pytest.fixture
def way() -> str:
    """How the commits of the default client's workers go; tests with `all_ways` and the like are run over several."""
    return "grpc"


@pytest.fixture
def live(request: pytest.FixtureRequest, way: str) -> Iterator[Live]:
    """A server with default settings, which shares memory in tests marked `shared_memory`, and if commits go that way."""
    shares = request.node.get_closest_marker("shared_memory") is not None or way == "memory"
    with serving(config(memory_socket=abstract() if shares else "")) as server:
        yield server


@pytest.fixture
def wire(live: Live, way: str) -> Iterator[Wire]:
    """A raw client of the default server."""
    with wired(live, way) as client:
        yield client


@pytest.fixture
def worker(wire: Wire) -> Worker:
    """A worker that has initialised θ and pulled it."""
    return wire.started("worker")


@pytest.fixture
def session(live: Live) -> Iterator[Session]:
    """A worker called alice with one commit."""
    with connect(live.address, name="alice") as joined:
        joined.join(model())
        joined.commit(GRADIENT, loss=1.25, samples=8)
        yield joined
