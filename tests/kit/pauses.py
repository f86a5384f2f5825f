"""Holds a server at a place in its code that a test chooses."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kit.server import DEADLINE


class Pause:
    """Whoever calls a function from now on waits in front of it until `end`."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self._reached, self._ended = threading.Event(), threading.Event()
        function = getattr(owner, name)

        def held(*arguments: Any, **named: Any) -> Any:
            self._reached.set()
            assert self._ended.wait(DEADLINE)
            return function(*arguments, **named)

        patch.setattr(owner, name, held)

    def reached(self) -> None:
        """Waits for the first call."""
        assert self._reached.wait(DEADLINE)

    def end(self) -> None:
        self._ended.set()
