"""Schemas of JSON that is read back, written as plain values, and the one function that checks a value against one.

str, bool        a value of that type
COUNT, BIG       a whole number from 0 to 2⁶³ − 1, or to 2⁶⁴ − 1
REAL             a number that a float can hold, infinities and NaN too
(schema, …)      an array of exactly these
[schema]         an array of any length
{name: schema}   an object with exactly these names
dict             an object, whatever it holds
{str: schema}    an object with any names; with an enumeration instead of str, with names of that
Maybe(schema)    that, or null
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

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
Big = Annotated[int, BIG]


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
    key: Any = next(iter(schema))
    if key is str:
        schema = dict.fromkeys(value, schema[str])
    elif isinstance(key, type) and issubclass(key, StrEnum):
        schema = {name: schema[key] for name in key if name in value}
    if unknown := value.keys() - schema.keys():
        raise ValueError(f"{what} has an unknown name, {min(unknown)[:50]!r}")
    for name, each in schema.items():
        if name not in value:
            raise ValueError(f"{what} has no {name!r}")
        require(value[name], each, f"{what}.{name[:50]}")


# -- types


class Codec(NamedTuple):
    """A type's schema, and what makes a value of the type from a JSON value that fits."""

    schema: Schema
    decode: Callable[[Any], Any]


def codec(kind: Any, known: Mapping[Any, Codec]) -> Codec:
    """The codec of a type: a dataclass is an object, a NamedTuple an array, an int a COUNT unless it is `Big`. `known` has the
    codecs of types whose fields don't describe them."""
    if kind in known:
        return known[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Codec(arguments[1], arguments[0])
    if origin is tuple or hasattr(kind, "_fields"):
        inner = [codec(each, known) for each in arguments or get_type_hints(kind, include_extras=True).values()]
        make = tuple if origin is tuple else kind._make
        return Codec(
            tuple(each.schema for each in inner),
            lambda value: make(part.decode(each) for part, each in zip(inner, value, strict=True)),
        )
    is_object: bool = is_dataclass(kind)
    if is_object:
        parts = {name: codec(each, known) for name, each in get_type_hints(kind, include_extras=True).items()}
        schema = {name: each.schema for name, each in parts.items()}
        return Codec(schema, lambda value: kind(**{name: each.decode(value[name]) for name, each in parts.items()}))
    inner = [codec(each, known) for each in arguments]
    if origin is UnionType:
        return Codec(Maybe(inner[0].schema), lambda value: None if value is None else inner[0].decode(value))
    if origin is list:
        return Codec([inner[0].schema], lambda value: list(map(inner[0].decode, value)))
    if origin is dict:
        name, part = arguments[0], inner[1]
        return Codec({name: part.schema}, lambda value: {name(key): part.decode(each) for key, each in value.items()})
    return Codec(COUNT if kind is int else kind, kind)
