"""A start that fails gives back what it took, also while its error, which refers to the server, is kept."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import Range
from gem_server.config import ServerConfig, StartError
from gem_server.durability.resume import lock_directory
from gem_server.event_loop import DecidingLoop
from gem_server.server import Server
from kit.core import commit, make_core, save_core, start
from kit.server import config

RULE = """
from dataclasses import dataclass
from gem_server.rules import ArrayRule

@dataclass(frozen=True)
class Broken(ArrayRule):
    learning_rate: float = 0.1

    def move(self, theta, update, buffers, rule_input):
        raise ValueError("a bug in the rule")
"""


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        (("10.0.0.2:0",), "the port '0' is not a number from 1 to 65535"),
        (("10.0.0.2\n:50051",), "is not a host name"),
        (("10.0.0.2:50051\n",), "'10.0.0.2:50051\\n'"),
        (("10.0.0.2:50051", "10.0.0.2:50051"), "names '10.0.0.2:50051' twice"),
        (("127.0.0.1:50051",), "names this server's own address"),
    ],
    ids=["port 0", "a line break", "a line break at the end", "twice", "its own"],
)
def test_peers_that_cannot_be_the_other_ranges_are_named(peers: tuple[str, ...], why: str, tmp_path: Path) -> None:
    part = Range(0, 1 + len(peers))
    with pytest.raises(StartError) as caught:
        ServerConfig(range=part, peers=peers, listen="127.0.0.1:50051", durability="log", checkpoint_dir=tmp_path).validate()
    assert "--peers" in str(caught.value)
    assert why in str(caught.value)


def failed_start(configuration: ServerConfig) -> StartError:
    async def attempt() -> None:
        await Server(configuration, time.monotonic, time.time, structlog.get_logger()).start()

    with pytest.raises(StartError) as failed, asyncio.Runner(loop_factory=DecidingLoop) as runner:
        runner.run(attempt())
    return failed.value


def open_files(folder: Path) -> list[str]:
    """The files below a folder that this process has open."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [link for link in links if link.startswith(f"{folder}/")]


def test_a_server_that_refuses_to_start_among_checkpoints_leaves_them_unlocked(tmp_path: Path) -> None:
    core = make_core()
    commit(core, start(core)[0], 1, 1.0)
    save_core(core, tmp_path)
    error = failed_start(config(checkpoint_dir=tmp_path))
    assert "add --resume" in str(error)
    lock_directory(tmp_path, structlog.get_logger()).close()  # StartError if it is locked


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
def test_a_server_whose_rule_fails_leaves_no_file_open_and_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    memory_socket = tmp_path / "socket"
    error = failed_start(
        config(
            Hyperparameters(rule="broken_rule:Broken"),
            checkpoint_dir=tmp_path / "run",
            history=tmp_path / "history.csv",
            memory_socket=str(memory_socket),
        )
    )
    assert "a bug in the rule" in str(error)
    assert open_files(tmp_path) == []
    assert not memory_socket.exists()


STOPPED_WHILE_IT_STARTS = """
import os, signal, sys, threading
import gem_server.server, gem_server.wiring
from gem_server.cli import main

def starting(*_):
    os.kill(os.getpid(), signal.{signal})
    threading.Event().wait(300)

gem_server.{where} = starting
main(["--listen", "127.0.0.1:0", "--metrics-listen", "", "--checkpoint-dir", sys.argv[1]])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "said"),
    [("wiring.make_core", "stopped before the run was restored"), ("server.warm_up", "stopped before it served")],
    ids=["while it recovers", "while it compiles"],
)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_server_that_is_stopped_while_it_starts_ends_at_once(number: str, where: str, said: str, tmp_path: Path) -> None:
    """Also as process 1 of a container, which signals without a handler don't reach."""
    script = STOPPED_WHILE_IT_STARTS.format(signal=number, where=where)
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE, text=True, timeout=50)
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
