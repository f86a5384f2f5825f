"""The checks of a section: each prints one line of JSON, and one that fails does not stop the others."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.sections import as_line

_ENDING_SECONDS = 8.0  # before the limit, at which the section is killed, no check begins
Found = dict[str, Any]  # the fields of a line; `ok` is true unless it is among them, and None if the check was skipped


@dataclass
class Checks:
    """Makes checks.

    Args:
        device: "cuda" or "cpu".
        quick: Whether models are tiny and measurements short.
        seconds: The section's time limit.
        match: Only checks in whose name this pattern occurs are made.
        show: Receives the lines.
    """

    device: str
    quick: bool
    seconds: float
    match: str
    show: Callable[[str], None]
    _began: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def left(self) -> float:
        """Seconds until no check begins any more."""
        return self._began + self.seconds - _ENDING_SECONDS - time.monotonic()

    def check(self, name: str, work: Callable[..., Found], *arguments: Any) -> None:
        """Prints what `work` returns, or its error."""
        if not re.search(self.match, name):
            return
        began = time.monotonic()
        try:
            late: Found = {"ok": None, "skipped": "no time is left in this section"}
            found = {"ok": True, **work(*arguments)} if self.left() > 0 else late
        except Exception as error:
            where = [f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in traceback.extract_tb(error.__traceback__)]
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600], "where": where[-4:]}
        self.show(as_line(name, **found, seconds=round(time.monotonic() - began, 2)))
