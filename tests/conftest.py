"""Shared fixtures."""

from __future__ import annotations

import gc
import logging
import os
import signal
import zlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
import structlog
from gem_client import Session, connect
from gem_server import server
from gem_server.lane import reactor
from hypothesis import settings
from kit.model import GRADIENT, model
from kit.raw_client import Wire, Worker
from kit.regions import abstract
from kit.server import Live, config, serving
from kit.ways import wired

if TYPE_CHECKING:
    from kit.accelerator import Accelerator

# The clock is no part of a test: no deadlines, and the same examples on every run.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"  # for the tests' own requests


# Rooms whose tests take long together: they run with `make test-all` alone.
LONG = {"engines", "examples", "integrations", "many_workers", "paper"}
# Of what takes long, only these run lines that nothing else runs. Counting lines makes the rest up to twice as slow.
COUNTED = {"engines", "integrations"}
COVERAGE = "COVERAGE_PROCESS_CONFIG"  # has processes that are started count their lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves to `make test-all`: whole rooms, and all but one way of a test that runs over several ways
    of a commit. Which way is left differs from test to test, so that each way is tried. The lines that these run are counted
    only if nothing else runs them. The simulation comes first: no process is to be alone with its many seeds at the end."""
    items.sort(key=lambda item: item.path.parent.name != "simulation")
    ways: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name in LONG:
            item.add_marker("long")
        if (call := getattr(item, "callspec", None)) and "way" in call.params:
            others = [part for part in call.id.split("-") if part != call.params["way"]]
            ways.setdefault(f"{item.nodeid.split('[')[0]} {others}", []).append(item)
    for test, same in ways.items():
        chosen = zlib.crc32(test.encode()) % len(same)
        for item in same[:chosen] + same[chosen + 1 :]:
            item.add_marker("long")
    for item in items:
        if item.get_closest_marker("long") and item.path.parent.name not in COUNTED:
            item.add_marker("no_cover")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Has the processes that a test without coverage starts count nothing either."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("no_cover"):
            patch.delenv(COVERAGE, raising=False)
        return (yield)


def pytest_xdist_auto_num_workers() -> int:
    """Three processes for two cores: tests that wait for a lease to end, or for a process, leave them idle."""
    return (os.cpu_count() or 1) * 3 // 2


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """An accelerator in Python, for the time of the test."""
    from kit.accelerator import plugged_in  # it imports PyTorch, which takes seconds

    yield from plugged_in(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def collect_quickly() -> None:
    """Some tests collect garbage to see what is left of a session. What the imports made is never garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def quiet_logs() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(autouse=True, scope="session")
def sweep_often() -> None:
    """A test moves the server's clock forward; the lanes then look at it at once, not in two seconds. The same holds for shared
    memory that nobody maps any more."""
    reactor.SWEEP_SECONDS = 0.02
    server.REGIONS_SECONDS = 0.05


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
