"""Shared fixtures of the tests of what is kept on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from gem_api.hyperparameters import Hyperparameters
from gem_server.config import ServerConfig
from kit.regions import abstract
from kit.server import config
from structlog.testing import capture_logs


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
def warned() -> Iterator[list[Any]]:
    """The warnings and errors that the server logs."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with capture_logs() as lines:
        yield lines
    structlog.configure(**before)
