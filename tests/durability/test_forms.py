"""JSON that is read back matches its schema, or the error names the place that does not."""

from __future__ import annotations

from typing import Any

import pytest
from gem_server.durability.schema import BIG, COUNT, REAL, Form, Maybe, Optional, Whole, require

RIGHT: list[tuple[Any, Form]] = [
    ("a", str),
    (True, bool),
    (0, COUNT),
    (2**63 - 1, COUNT),
    (2**64 - 1, BIG),
    (7, Whole(7, 7)),
    (1, REAL),
    (float("nan"), REAL),
    (None, Maybe(str)),
    ("a", Maybe(str)),
    ([], [COUNT]),
    ([1, 2], [COUNT]),
    ([1, 0.5], [REAL]),
    (["a", 1], (str, COUNT)),
    ({"a": 1, "more": None}, {"a": COUNT}),
    ({}, {"a": Optional(COUNT)}),
    ({"x": 1, "y": 2}, {str: COUNT}),
    ([["a", [1]]], [(str, [COUNT])]),
]
WRONG: list[tuple[Any, Form, str]] = [
    (1, str, "it can't be '1'"),
    (True, COUNT, "it can't be 'True'"),
    (True, REAL, "it can't be 'True'"),
    (1.0, COUNT, "it can't"),
    (-1, COUNT, "it can't be '-1'"),
    (2**63, COUNT, "it can't"),
    (2**64, BIG, "it can't"),
    ("1", REAL, "it can't"),
    (None, str, "it can't be 'None'"),
    (1, Maybe(str), "it can't"),
    ({}, [COUNT], "it can't"),
    ("ab", [str], "it can't be 'ab'"),
    ([1, -1], [COUNT], r"it\[1\] can't be '-1'"),
    ([1, True], [COUNT], r"it\[1\] can't be 'True'"),
    ([1, "x"], [REAL], r"it\[1\] can't be 'x'"),
    (["a"], (str, COUNT), "it can't"),
    ([], {"a": COUNT}, "it can't"),
    ({}, {"a": COUNT}, "it has no 'a'"),
    ({"a": None}, {"a": Optional(COUNT)}, "it.a can't be 'None'"),
    ({"x": "y"}, {str: COUNT}, "it.x can't be 'y'"),
    ([["a", [1, -1]]], [(str, [COUNT])], r"it\[0\]\[1\]\[1\] can't be '-1'"),
]


@pytest.mark.parametrize(("value", "form"), RIGHT)
def test_what_has_the_form_is_taken(value: Any, form: Form) -> None:
    require(value, form, "it")


@pytest.mark.parametrize(("value", "form", "why"), WRONG)
def test_what_has_another_form_is_refused_by_its_place(value: Any, form: Form, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        require(value, form, "it")
