"""What JSON that is read back must look like, written as plain values, and the one function that checks it.

str, bool      a value of that type
COUNT, REAL    a whole number from 0 to 2⁶³ − 1; a number, infinities and NaN too
BIG            a whole number from 0 to 2⁶⁴ − 1
(form, …)      an array of exactly these
[form]         an array of any length
{name: form}   an object with at least these names; one that is Optional(form) may be missing
{str: form}    an object with any names
Maybe(form)    that, or null
"""

from __future__ import annotations

from typing import Any, NamedTuple

Form = Any


class Whole(NamedTuple):
    """Whole numbers of a range, both ends included."""

    least: int
    most: int


class Maybe(NamedTuple):
    """That, or null."""

    form: Form


class Optional(NamedTuple):
    """That, or nothing at all: a name that an older version did not write."""

    form: Form


class _Real:
    """A number."""


COUNT = Whole(0, (1 << 63) - 1)
BIG = Whole(0, (1 << 64) - 1)
REAL = _Real()


def require(value: Any, form: Form, what: str) -> None:
    """Raises ValueError, naming the place, where a value has another form; `what` names the value."""
    if isinstance(form, Maybe):
        if value is not None:
            require(value, form.form, what)
    elif isinstance(form, Whole):
        _require(isinstance(value, int) and not isinstance(value, bool) and form.least <= value <= form.most, value, what)
    elif form is REAL:
        _require(isinstance(value, int | float) and not isinstance(value, bool), value, what)
    elif isinstance(form, type):
        _require(isinstance(value, form), value, what)
    elif isinstance(form, dict):
        _require(isinstance(value, dict), value, what)
        _require_members(value, form, what)
    else:
        fixed = isinstance(form, tuple)
        _require(isinstance(value, list) and (not fixed or len(value) == len(form)), value, what)
        if not fixed and _all_numbers(value, form[0]):
            return
        for i, each in enumerate(value):
            require(each, form[i] if fixed else form[0], f"{what}[{i}]")


def _all_numbers(values: list[Any], form: Form) -> bool:
    """Whether a long array is in order, found without a look at each element in Python; if not, that look says where."""
    kinds = set(map(type, values))
    if isinstance(form, Whole):
        return kinds == {int} and form.least <= min(values) and max(values) <= form.most
    return form is REAL and kinds <= {int, float}


def _require_members(value: dict[str, Any], form: dict[Any, Form], what: str) -> None:
    if str in form:
        form = dict.fromkeys(value, form[str])
    for name, each in form.items():
        optional = isinstance(each, Optional)
        if name in value:
            require(value[name], each.form if optional else each, f"{what}.{name}")
        elif not optional:
            raise ValueError(f"{what} has no {name!r}")


def _require(condition: bool, value: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} can't be {str(value)[:50]!r}")
