"""How a session ends: closed once or twice, by an error, by a fork, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from client.conftest import Transport
from client.range_helpers import ranges
from gem_client import InvalidRequest, connect
from gem_server.rpc.training import TrainingServicer
from kit.model import GRADIENT, ended, in_background, model, workers
from kit.server import DEADLINE, Live, config, serving


@pytest.mark.usefixtures("transport")
def test_a_closed_session_is_of_no_more_use_and_closes_twice(live: Live) -> None:
    session = connect(live.address)
    session.join(model())
    session.close()
    session.close()
    for use in (lambda: session.commit(GRADIENT), session.pull, lambda: session.join(model())):
        with pytest.raises(InvalidRequest, match="closed"):
            use()
    assert ended(live) == {"left": 1}


@pytest.mark.parametrize(
    ("work", "lines"),
    [
        (lambda session: session.join(model()), 1),
        (lambda session: (session.join(model()), session.pull_final()), 1),
        (lambda session: (session.join(model()), session.commit(GRADIENT)), 0),
        (lambda session: session.read(), 0),
    ],
    ids=["joined", "waited for the end", "committed", "a reader"],
)
def test_a_worker_that_ends_without_a_commit_says_so_once(work: Any, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """It may have come late, or its loop may make no step with the session."""
    with serving(config()) as live:
        with connect(live.address) as first:
            first.join(model())
            first.commit(GRADIENT)
        caplog.clear()
        with connect(live.address) as session:
            work(session)
    assert sum("this worker made no commit" in record.getMessage() for record in caplog.records) == lines


@pytest.mark.usefixtures("transport")
def test_a_forked_child_can_neither_use_nor_end_its_parents_session(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    session = connect(live.address)
    session.join(model())
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(InvalidRequest, match="fork"):
            session.commit(GRADIENT)
        session.close()
    left = workers(live)
    session.close()
    assert left == [session.name]


def test_closing_does_not_wait_long_for_a_server_that_is_gone(transport: Transport) -> None:
    with serving(config(**transport.settings)) as live:
        session = connect(live.address)
        session.join(model())
        live.stop()
        in_background(session.close).result(DEADLINE)


def test_closing_waits_for_a_server_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many workers end at once: each goodbye must outlast the queue before it, or a lease expires for nothing."""
    leave, patience = TrainingServicer.leave_cluster, []

    async def noting(servicer: TrainingServicer, call: Any, request: Any, context: Any) -> Any:
        patience.append(context.time_remaining())
        return await leave(servicer, call, request, context)

    monkeypatch.setattr(TrainingServicer, "leave_cluster", noting)
    with serving() as live:
        with connect(live.address) as session:
            session.join(model())
        assert ended(live) == {"left": 1}
    assert 20 < patience[0] < 40


LEFT_OPEN = """
import sys, gem_client, numpy
session = gem_client.connect(sys.argv[1], shared_memory=False)
session.join({"w": numpy.ones(9000, numpy.float32)}, overlap=True)
print("joined", flush=True)
sys.stdin.readline()
session.begin_commit(numpy.ones(9000, numpy.float32))
print("the end", flush=True)
"""


def test_a_session_that_nobody_closed_does_not_keep_its_process_alive(tmp_path: Path) -> None:
    """The servers have gone, and the commit under way is tried again for 300 seconds."""
    pipe = subprocess.PIPE
    with ranges(tmp_path, 2) as run:
        command = [sys.executable, "-c", LEFT_OPEN, run.address]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "joined\n"
                run.stop()
                assert process.communicate("go on\n", timeout=DEADLINE)[0] == "the end\n"
                assert process.returncode == 0
            finally:
                process.kill()
