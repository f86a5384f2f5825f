"""Stored results: JSON with one result a line, so that changes are easy to read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The stored results; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write(path: Path, results: Iterable[dict[str, Any]]) -> None:
    """Replaces the file. If that is interrupted, the file stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n", encoding="utf-8")
    unfinished.replace(path)
