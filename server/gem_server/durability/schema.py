"""What JSON that is read back must look like, written as plain values, and the one function that checks it.

str, bool      a value of that type
COUNT, BIG     a whole number from 0 to 2⁶³ − 1, or to 2⁶⁴ − 1
REAL           a number that a float can hold, infinities and NaN too
(form, …)      an array of exactly these
[form]         an array of any length
{name: form}   an object with at least these names
{str: form}    an object with any names
Maybe(form)    that, or null
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

Form = Any


@dataclass(frozen=True)
class Whole:
    """Whole numbers of a range, both ends included."""

    least: int
    most: int


@dataclass(frozen=True)
class Maybe:
    """That, or null."""

    form: Form


COUNT = Whole(0, (1 << 63) - 1)
BIG = Whole(0, (1 << 64) - 1)
REAL = float


def require(value: Any, form: Form, what: str) -> None:
    """Raises ValueError, naming the path of the wrong value and what is expected there; `what` names the value."""
    if isinstance(form, Maybe):
        if value is not None:
            require(value, form.form, what)
        return
    if not _fits(value, form):
        raise ValueError(f"{what} must be {_described(form)}, not {str(value)[:50]!r}")
    if isinstance(form, dict):
        _require_members(value, form, what)
    elif isinstance(form, tuple):
        for i, (each, expected) in enumerate(zip(value, form, strict=True)):
            require(each, expected, f"{what}[{i}]")
    elif isinstance(form, list) and not _all_numbers(value, form[0]):
        for i, each in enumerate(value):
            require(each, form[0], f"{what}[{i}]")


def _fits(value: Any, form: Form) -> bool:
    """Whether a value is of the expected kind; what an array or an object holds is not looked at."""
    if isinstance(form, Whole):
        return type(value) is int and form.least <= value <= form.most
    if form is REAL:
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form)
    return isinstance(value, form if isinstance(form, type) else type(form))


def _described(form: Form) -> str:
    if isinstance(form, Whole):
        return f"a whole number from {form.least} to {form.most}"
    if isinstance(form, tuple):
        return f"an array of {len(form)} elements"
    kind = form if isinstance(form, type) else type(form)
    return {str: "a text", bool: "true or false", REAL: "a number", list: "an array", dict: "an object"}[kind]


def _all_numbers(values: list[Any], form: Form) -> bool:
    """Whether a long array is in order, found without a look at each element in Python; if not, that look says where."""
    kinds = set(map(type, values))
    if isinstance(form, Whole):
        return kinds == {int} and form.least <= min(values) and max(values) <= form.most
    return form is REAL and kinds == {float}


def _require_members(value: dict[str, Any], form: dict[Any, Form], what: str) -> None:
    if str in form:
        form = dict.fromkeys(value, form[str])
    for name, each in form.items():
        if name not in value:
            raise ValueError(f"{what} has no {name!r}")
        require(value[name], each, f"{what}.{name}")
