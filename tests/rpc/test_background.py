"""What runs in a thread or a background task of the server goes on after an error, or the server says it and stops."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gem_server.background import start_chore
from gem_server.config import StartError
from gem_server.durability.group_commit import GroupCommit
from gem_server.lane.reactor import Reactor
from kit.logs import Lines, captured
from kit.raw_client import Wire
from kit.server import DEADLINE, Live, config
from kit.ways import opened

ROOT = Path(__file__).parents[2]
# Every background task of a server that does all that it can.
CHORES = (
    "apply", "leases", "completion", "schedule", "view", "health", "lag", "lane", "regions", "turns", "history", "checkpoints",
    "log", "end",
)  # fmt: skip
# What starts a thread or a task, and where it may: every other place must use `gem_server.background`.
STARTERS = {"Thread", "Timer", "create_task", "ensure_future", "start_new_thread"}
ALLOWED = {
    "background.py": "the one place",
    "durability/checkpointer.py": "the caller awaits it",
    "lane/listener.py": "a TaskGroup, which hands errors on",
    "server.py": "it waits for an event alone",
    "process/http_port.py": "it goes on, see test_http_port.py",
}


@pytest.fixture
def said() -> Iterator[Lines]:
    """The errors that the server logs."""
    with captured(logging.ERROR) as lines:
        yield lines


def busy(folder: Path) -> Live:
    """A server with all background tasks."""
    files: dict[str, Any] = {"history": folder / "history.csv", "checkpoint_dir": folder / "run"}
    return Live(config(metrics_listen="127.0.0.1:0", durability="log", **files))


def ended(live: Live) -> BaseException:
    """What the server ends with, by itself."""
    live._thread.join(DEADLINE)
    assert not live._thread.is_alive(), "the server goes on without a thread or task that has failed"
    with pytest.raises((MemoryError, ExceptionGroup, StartError)) as raised:
        live.stop()
    return raised.value


@pytest.mark.parametrize("name", CHORES)
def test_a_background_task_that_fails_is_named_and_ends_the_server(
    name: str, said: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    async def fail() -> None:
        raise MemoryError("planted")

    def starting(each: str, work: Callable[..., Any], logger: Any) -> Any:
        started.append(each)
        return start_chore(each, fail if each == name else work, logger)

    monkeypatch.setattr("gem_server.server.start_chore", starting)
    error = ended(busy(tmp_path))
    assert sorted(started) == sorted(CHORES), "list every background task in CHORES"
    assert "planted" in str(error)
    assert {line["task"] for line in said} == {name}


THREADS = {"log": (GroupCommit, "_next_group"), "lane": (Reactor, "_sweep")}


@pytest.mark.parametrize("name", THREADS)
def test_a_thread_that_fails_ends_the_server(name: str, said: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(*THREADS[name], fail)
    assert "planted" in str(ended(busy(tmp_path)))
    assert {line["task"] for line in said} == {name}


@pytest.mark.parametrize("where", ["_watch", "_ready_soon"])
def test_an_error_ends_its_lane_alone(where: str, said: Lines, live: Live, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [True]
    original = getattr(Reactor, where)

    def fail_once(*arguments: Any) -> Any:
        if fails:
            fails.pop()
            raise MemoryError("planted")
        return original(*arguments)

    worker = wire.started("worker")
    monkeypatch.setattr(Reactor, where, fail_once)
    with pytest.raises((EOFError, OSError)):
        opened(worker, "tcp")
    lane = opened(worker, "tcp")
    assert worker.commit_on(lane)[0].version == 1
    lane.cancel()
    assert ["a lane" in line["event"] for line in said] == [True]


def test_every_thread_and_task_begins_where_its_errors_are_seen() -> None:
    found = set()
    for folder in (ROOT / "server" / "gem_server", ROOT / "proto" / "gem_api"):
        for path in folder.rglob("*.py"):
            calls = [node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
            if {ast.unparse(call).rpartition(".")[2] for call in calls} & STARTERS:
                found.add(path.relative_to(folder).as_posix())
    assert found == ALLOWED.keys()
