"""gem-ctl health, for containers' health checks and scripts: only its exit status counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from gem_client import Admin, GemError
from gem_ctl.cli import main
from kit.raw_client import apply_thread_held
from kit.server import Live, wait_until
from kit.settings import configured


def health(address: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["--server", address, *options, "health"], env={"GEM_SERVER": None, "GEM_TIMEOUT": None})


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_is_healthy_before_anyone_has_joined_and_not_any_more_once_it_finishes(live: Live) -> None:
    assert (health(live.address).exit_code, health(live.address).stdout) == (0, "serving\n")
    with Admin(live.address) as admin, apply_thread_held(live):
        admin.drain()
        wait_until(lambda: not admin.healthy(), "the server to begin its end")
        result = health(live.address)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "shutting down" in result.stderr


def test_a_server_that_hangs_is_not_healthy(silent: str) -> None:
    result = health(silent, configured(timeout=0.2))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    with Admin(silent, timeout=0.2) as admin, pytest.raises(GemError):
        admin.healthy()
