"""Shared fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher.train_helpers import Launch, Launcher


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts gem-train in the test's own folder."""
    launched: list[Launcher] = []

    def start(*arguments: str, **settings: Any) -> Launcher:
        launched.append(Launcher(tmp_path, *arguments, **settings))
        return launched[-1]

    yield start
    for launcher in launched:
        launcher.close()
