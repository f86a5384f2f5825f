"""The probes of the HTTP port: /healthz fails if the event loop hangs, /readyz also while no worker can train."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gem_api.process.http_port import serve_metrics
from gem_client import Admin, connect
from gem_server import server
from gem_server.durability import storage
from gem_server.durability.resume import make_core
from gem_server.telemetry.health import STUCK_SECONDS, Health
from kit.model import Patience, in_background, model
from kit.raw_client import apply_thread_held
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.tokens import LINES, write_tokens
from telemetry.http_client import ask_address


def probe(live: Live, path: str) -> tuple[int, str]:
    return probe_at(live.server.wiring.endpoint.http_address, path)


def probe_at(address: str, path: str) -> tuple[int, str]:
    response = ask_address(address, path)
    return response.status, response.body.decode()


@pytest.fixture
def probed() -> Iterator[Live]:
    with serving(config(metrics_listen="127.0.0.1:0")) as live:
        yield live


def test_a_start_and_an_end_may_take_as_long_as_they_need_and_nothing_in_between() -> None:
    now = [0.0]
    health = Health(lambda: now[0])
    now[0] += 3600
    assert (health.why_dead(), health.why_unready()[:8]) == ("", "starting")
    health.serving(lambda: "")
    now[0] += STUCK_SECONDS
    assert (health.why_dead(), health.why_unready()) == ("", "")
    now[0] += 1
    assert health.why_dead() == health.why_unready() == "the event loop has not turned for 31 s"
    health.beat()
    assert (health.why_dead(), health.why_unready()) == ("", "")
    health.ending()
    now[0] += 3600
    assert (health.why_dead(), health.why_unready()[:13]) == ("", "shutting down")


def test_a_server_that_serves_is_alive_and_ready_and_asks_for_no_token(tmp_path: Path) -> None:
    with serving(config(metrics_listen="127.0.0.1:0", tokens=write_tokens(tmp_path / "tokens", *LINES))) as live:
        assert probe(live, "/healthz") == (200, "alive\n")
        assert probe(live, "/readyz") == (200, "ready\n")


def test_while_the_run_is_restored_the_server_is_alive_but_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    seen: list[tuple[int, str]] = []

    def noting(*args: Any) -> str:
        addresses.append(serve_metrics(*args))
        return addresses[-1]

    def restoring(*args: Any) -> Any:
        seen.extend(probe_at(addresses[0], path) for path in ("/healthz", "/readyz"))
        return make_core(*args)

    monkeypatch.setattr("gem_server.endpoint.serve_metrics", noting)
    monkeypatch.setattr("gem_server.wiring.make_core", restoring)
    with serving(config(metrics_listen="127.0.0.1:0")) as live:
        assert probe(live, "/readyz")[0] == 200
    assert seen == [(200, "alive\n"), (503, "starting: the run is being restored from its checkpoint and its log\n")]


def test_an_event_loop_that_hangs_is_said_at_once_and_holds_no_probe(probed: Live) -> None:
    health, release, held = probed.server.wiring.endpoint.health, threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(DEADLINE)

    blocked = in_background(lambda: probed.on_loop(hold))
    assert held.wait(DEADLINE)
    health._clock = lambda: time.monotonic() + 1000
    try:
        for path in ("/healthz", "/readyz"):
            status, reason = probe(probed, path)
            assert (status, reason[:30]) == (503, "the event loop has not turned ")
    finally:
        release.set()
    blocked.result(DEADLINE)
    wait_until(lambda: probe(probed, "/healthz") == (200, "alive\n"), "the loop to turn again")


def test_a_server_that_drains_is_alive_but_not_ready(probed: Live) -> None:
    with Admin(probed.address) as admin, apply_thread_held(probed):
        admin.drain()
        wait_until(lambda: probe(probed, "/readyz")[0] == 503, "the server to drain")
        assert probe(probed, "/readyz")[1].startswith("shutting down: ")
        assert probe(probed, "/healthz") == (200, "alive\n")


def test_a_server_whose_log_is_stalled_is_alive_but_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logged = config(metrics_listen="127.0.0.1:0", checkpoint_dir=tmp_path, durability="log")
    with serving(logged) as live, connect(live.address, retry=Patience().retry()) as session:
        monkeypatch.setattr(storage._File, "allocate", full)
        joining = in_background(lambda: session.join(model()))
        wait_until(lambda: probe(live, "/readyz")[0] == 503, "the log to be stalled")
        assert probe(live, "/readyz")[1].startswith("stalled: too little room on the disk of the server's log")
        assert probe(live, "/healthz") == (200, "alive\n")
        monkeypatch.undo()
        joining.result(DEADLINE)
        assert probe(live, "/readyz") == (200, "ready\n")


def test_whatever_holds_the_event_loop_shows_in_its_lag() -> None:
    class Suspended(asyncio.SelectorEventLoop):
        """A loop whose clock jumps ahead while it waits."""

        ahead = 0.0

        def time(self) -> float:
            return super().time() + self.ahead

    async def measured(loop: Suspended) -> list[float]:
        lags: list[float] = []
        measuring = asyncio.create_task(server._measure_lag(lags.append))
        await asyncio.sleep(0)
        loop.ahead = 100.0
        while not lags:
            await asyncio.sleep(0)
        measuring.cancel()
        return lags

    loop = Suspended()
    (lag,) = loop.run_until_complete(measured(loop))
    loop.close()
    assert 99 <= lag < 99 + DEADLINE
