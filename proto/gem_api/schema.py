"""Schemas of JSON that is read back, written as plain values, and the one function that checks a value against one.

str, bool        a value of that type
COUNT, BIG       a whole number from 0 to 2⁶³ − 1, or to 2⁶⁴ − 1
REAL             a number that a float can hold, infinities and NaN too
(schema, …)      an array of exactly these
[schema]         an array of any length
{name: schema}   an object with exactly these names
dict             an object, whatever it holds
{str: schema}    an object with any names
Maybe(schema)    that, or null
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

Schema = Any


@dataclass(frozen=True)
class Whole:
    """Whole numbers of a range, both ends included."""

    least: int
    most: int


@dataclass(frozen=True)
class Maybe:
    """That, or null."""

    inner: Schema


COUNT = Whole(0, (1 << 63) - 1)
BIG = Whole(0, (1 << 64) - 1)
REAL = float


def require(value: Any, schema: Schema, what: str) -> None:
    """Raises ValueError, naming the path of the wrong value and what is expected there; `what` names the value."""
    if isinstance(schema, Maybe):
        if value is not None:
            require(value, schema.inner, what)
        return
    if not _fits(value, schema):
        raise ValueError(f"{what} must be {_described(schema)}, not {str(value)[:50]!r}")
    if isinstance(schema, dict):
        _require_members(value, schema, what)
    elif isinstance(schema, tuple):
        for i, (each, expected) in enumerate(zip(value, schema, strict=True)):
            require(each, expected, f"{what}[{i}]")
    elif isinstance(schema, list) and not _all_numbers(value, schema[0]):
        for i, each in enumerate(value):
            require(each, schema[0], f"{what}[{i}]")


def _fits(value: Any, schema: Schema) -> bool:
    """Whether a value is of the expected kind; what an array or an object holds is not looked at."""
    if isinstance(schema, Whole):
        return type(value) is int and schema.least <= value <= schema.most
    if schema is REAL:
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    if isinstance(schema, tuple):
        return isinstance(value, list) and len(value) == len(schema)
    return isinstance(value, schema if isinstance(schema, type) else type(schema))


def _described(schema: Schema) -> str:
    if isinstance(schema, Whole):
        return f"a whole number from {schema.least} to {schema.most}"
    if isinstance(schema, tuple):
        return f"an array of {len(schema)} elements"
    kind = schema if isinstance(schema, type) else type(schema)
    return {str: "a text", bool: "true or false", REAL: "a number", list: "an array", dict: "an object"}[kind]


def _all_numbers(values: list[Any], schema: Schema) -> bool:
    """Whether a long array is in order, found without a look at each element in Python; if not, that look says where."""
    kinds = set(map(type, values))
    if isinstance(schema, Whole):
        return kinds == {int} and schema.least <= min(values) and max(values) <= schema.most
    return schema is REAL and kinds == {float}


def _require_members(value: dict[str, Any], schema: dict[Any, Schema], what: str) -> None:
    if str in schema:
        schema = dict.fromkeys(value, schema[str])
    elif unknown := value.keys() - schema.keys():
        raise ValueError(f"{what} has an unknown name, {min(unknown)[:50]!r}")
    for name, each in schema.items():
        if name not in value:
            raise ValueError(f"{what} has no {name!r}")
        require(value[name], each, f"{what}.{name[:50]}")
