"""Clients that go away while they are answered: that is no error of the server's, and it says nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from gem_api.layout import Layout
from live import Live, serving, wait_until
from structlog.testing import capture_logs
from wire_client import Worker, wired

LARGE = Layout.of({"w": (8_000_000,)})  # more than any buffer between the two takes
ANSWERED: dict[str, Callable[[Worker], Any]] = {
    "a pull": lambda worker: worker.open_pull(),
    "a commit": lambda worker: worker.whole(worker.header(), *worker.body(0.001)),
}


def sent_bytes(live: Live) -> int:
    return live.on_loop(lambda: live.server.parts.traffic.sent)


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the server logs."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with capture_logs() as entries:
        yield entries
    structlog.configure(**before)


@pytest.mark.parametrize("what", ANSWERED)
def test_a_client_that_goes_away_in_the_middle_of_its_answer_is_no_error(
    what: str, logged: list[MutableMapping[str, Any]]
) -> None:
    calls: list[Any] = []  # a call that is forgotten is cancelled too early
    with serving() as live:
        with wired(live) as wire:
            wire.started("first", LARGE).leave()
        for number in range(3):
            with wired(live) as wire:
                worker = wire.join(f"worker {number}", LARGE)
                worker.pull()
                before = sent_bytes(live)
                calls.append(ANSWERED[what](worker))
                wait_until(lambda: sent_bytes(live) > before, "the answer to begin")  # noqa: B023
            wait_until(lambda: not live.on_loop(lambda: live.server.parts.training._calls._all), "the call to end")
    assert "worker registered" in [entry["event"] for entry in logged]
    assert [entry for entry in logged if entry["log_level"] == "error"] == []
