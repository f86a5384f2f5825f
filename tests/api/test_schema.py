"""JSON that is read back is checked: an error names the path of the wrong value, and what is expected there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gem_api.schema import BIG, COUNT, REAL, Maybe, Schema, Whole, require

RIGHT: list[tuple[Any, Schema]] = [
    ("a", str),
    (True, bool),
    (2**63 - 1, COUNT),
    (2**64 - 1, BIG),
    (7, Whole(7, 7)),
    (1, REAL),
    (float("nan"), REAL),
    (None, Maybe(str)),
    ("a", Maybe(str)),
    ([], [COUNT]),
    ([1, 0.5], [REAL]),
    (["a", 1], (str, COUNT)),
    ({"a": 1, "more": None}, dict),
    ({"x": 1, "y": 2}, {str: COUNT}),
    ([["a", [1]]], [(str, [COUNT])]),
]
WRONG: list[tuple[Any, Schema, str]] = [
    (1, str, "it must be a text, not '1'"),
    (1, bool, "it must be true or false, not '1'"),
    (True, COUNT, "it must be a whole number from 0 to 9223372036854775807, not 'True'"),
    (True, REAL, "it must be a number, not 'True'"),
    (10**400, REAL, f"it must be a number, not '{10**49}'"),
    (1.0, COUNT, "it must be a whole number from 0 to 9223372036854775807, not '1.0'"),
    (2**63, COUNT, "it must be a whole number from 0 to 9223372036854775807, not '9223372036854775808'"),
    (2**64, BIG, "it must be a whole number from 0 to 18446744073709551615, not '18446744073709551616'"),
    (8, Whole(7, 7), "it must be a whole number from 7 to 7, not '8'"),
    ("1", REAL, "it must be a number, not '1'"),
    (None, str, "it must be a text, not 'None'"),
    (1, Maybe(str), "it must be a text, not '1'"),
    ({}, [COUNT], "it must be an array, not '{}'"),
    ([1, -1], [COUNT], "it[1] must be a whole number from 0 to 9223372036854775807, not '-1'"),
    ([1, True], [COUNT], "it[1] must be a whole number from 0 to 9223372036854775807, not 'True'"),
    ([1.0, 10**400], [REAL], f"it[1] must be a number, not '{10**49}'"),
    (["a"], (str, COUNT), "it must be an array of 2 elements, not \"['a']\""),
    ([], {"a": COUNT}, "it must be an object, not '[]'"),
    ({}, {"a": COUNT}, "it has no 'a'"),
    ({"a": 1, "more": None}, {"a": COUNT}, "it has an unknown name, 'more'"),
    (["a"], dict, "it must be an object, not \"['a']\""),
    ({"x": "y"}, {str: REAL}, "it.x must be a number, not 'y'"),
    ([["a", [1, "b"]]], [(str, [REAL])], "it[0][1][1] must be a number, not 'b'"),
]


@pytest.mark.parametrize(("value", "schema"), RIGHT)
def test_a_value_that_fits_its_schema_is_taken(value: Any, schema: Schema) -> None:
    require(value, schema, "it")


@pytest.mark.parametrize(("value", "schema", "why"), WRONG)
def test_a_value_that_does_not_fit_is_refused_by_its_path(value: Any, schema: Schema, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        require(value, schema, "it")
