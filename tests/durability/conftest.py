"""Shared fixtures of the tests of what is kept on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_server.config import ServerConfig
from gem_server.durability import segment
from kit.logs import Lines, captured
from kit.regions import abstract
from kit.server import config


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives the test: it need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "fdatasync", lambda handle: None)


@pytest.fixture
def logged(tmp_path: Path) -> ServerConfig:
    """A server that keeps a log, and shares memory."""
    settings = Hyperparameters(batch_size=4, shard_size=8)
    return config(settings, checkpoint_dir=tmp_path / "run", durability="log", memory_socket=abstract())


@pytest.fixture
def warned() -> Iterator[Lines]:
    """The warnings and errors that the server logs."""
    with captured() as lines:
        yield lines


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that copies of a log are quick."""
    monkeypatch.setattr(segment, "_ALLOCATION", 1 << 16)
