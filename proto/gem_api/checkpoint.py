"""A checkpoint's folder, as the server writes it and backups copy it: its name, its files, and their checksums.

checkpoint-<version>-<serial>/{state.json, model.safetensors, workers.safetensors}

state.json has its own SHA-256, and the size and SHA-256 of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from gem_api.formats import CHECKPOINT, checkpoint_number, of_another_release
from gem_api.ranges import MAX_RANGES
from gem_api.schema import COUNT

STATE, TENSORS = "state.json", ("model.safetensors", "workers.safetensors")
NAME = r"checkpoint-(\d{12})-(\d{4,})"
SUMS = {name: {"bytes": COUNT, "sha256": str} for name in TENSORS}  # the schema of the part `files`


class HigherFormat(Exception):
    """A checkpoint of a later release: it is not damaged."""


def name_of(version: int, serial: int = 1) -> str:
    return f"checkpoint-{version:012d}-{serial:04d}"


def version_and_serial(name: str) -> tuple[int, int] | None:
    """A checkpoint's version and serial; None if it is not the name of one."""
    match = re.fullmatch(NAME, name)
    return (int(match[1]), int(match[2])) if match else None


def digest(state: dict[str, Any], default: Callable[[Any], Any] | None = None) -> str:
    """SHA-256 of a state's JSON, keys sorted, without the digest itself. `default` is json's."""
    hashed = {name: value for name, value in state.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=default).encode()).hexdigest()


def intact_state(content: bytes, path: object) -> dict[str, Any]:
    """A state.json of no higher format, that has its own SHA-256. Nothing else is checked.

    Raises:
        HigherFormat: A later release wrote it.
        ValueError, LookupError, TypeError, AttributeError, RecursionError: It was changed, or is not one.
    """
    state: dict[str, Any] = json.loads(content)
    if (number := checkpoint_number(state)) > CHECKPOINT:
        raise HigherFormat(of_another_release(path, number, CHECKPOINT, state.get("server_version")))
    if digest(state) != state["sha256"]:
        raise ValueError("it was changed after it was written: its SHA-256 differs")
    return state


def require_range(index: int, count: int) -> None:
    """Raises ValueError if there can't be such a range."""
    if not index < count <= MAX_RANGES:
        raise ValueError(f"state.range is {index} of {count}: there are 1 to {MAX_RANGES} ranges, from 0")
