"""Results that are kept in files. A file is replaced as a whole: if that is interrupted, it stays as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

Row = dict[str, Any]
K = TypeVar("K")
V = TypeVar("V")


class DamagedError(click.ClickException):
    """A file of results can't be read; the message says what to do."""


def write(path: Path, text: str) -> None:
    """Replaces the file, and makes its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    write(path, json.dumps(content, indent=indent) + "\n")


def write_rows(path: Path, rows: Iterable[Row], head: Row | None = None) -> None:
    """Writes an array with one row a line, so that changes are easy to read; with a head, as its last field, `runs`."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    begin = "".join(f'"{name}": {json.dumps(value)},\n' for name, value in (head or {}).items())
    write(path, f'{{{begin}"runs": [\n{lines}\n]}}\n' if head else f"[\n{lines}\n]\n")


def plain(value: float | None, digits: int = 6) -> float | None:
    """A number with this many digits; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def finite(found: Any) -> Row:
    """The fields of a dataclass of numbers, with null for what JSON lacks."""
    return {name: plain(value) for name, value in vars(found).items()}


def restored(row: Row, **missing: float) -> dict[str, float]:
    """The fields of `finite`; null is NaN, or as `missing` says."""
    return {name: missing.get(name, math.nan) if value is None else value for name, value in row.items()}


class Store(dict[K, V]):
    """Results by their settings, in a file with a row for each.

    Args:
        path: The file; it need not exist.
        name: What the settings are called in a row.
        settings: Their dataclass.
        encode: The other fields of a result's row.
        decode: The result, from its settings and those fields.
        head: What stands before the rows, if anything. The file must have the same `format`; the rest is taken from it.

    Raises:
        DamagedError: The file can't be read.
    """

    def __init__(
        self, path: Path, name: str, settings: Callable[..., K], encode: Callable[[V], Row], decode: Callable[[K, Row], V],
        head: Row | None = None,
    ) -> None:  # fmt: skip
        self.path, self.head = path, dict(head or {})
        self._name, self._settings, self._encode, self._decode = name, settings, encode, decode
        self._load()

    def add(self, key: K, value: V) -> V:
        """Saves at once, so that an interruption loses only the run in progress. Keeps what other processes have saved. Returns
        the value."""
        self._load()
        self[key] = value
        rows = ({self._name: vars(key), **self._encode(each)} for key, each in self.items())
        write_rows(self.path, rows, self.head)
        return value

    def _load(self) -> None:
        if not self.path.exists():
            return
        try:
            body = json.loads(self.path.read_text(encoding="utf-8"))
            if self.head:
                if body["format"] != self.head["format"]:
                    raise ValueError(f"format {body['format']}, not {self.head['format']}")
                self.head = {name: body[name] for name in self.head}
            for row in body["runs"] if self.head else body:
                key = self._settings(**row.pop(self._name))
                self[key] = self._decode(key, row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{self.path} can't be read ({error!r}): restore it") from error
