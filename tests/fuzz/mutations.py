"""Makes damaged bytes from a seed, for machines without a coverage-guided fuzzer, which would do it better."""

from __future__ import annotations

import json
import random
from typing import Any

NASTY = [
    b"-1", b"0", b"null", b"1e999", b"NaN", b"true", b"[]", b"{}", b'""', b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551615", b"1" * 400, b"[" * 2000, b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", b"F64", b"lease-2",
]  # fmt: skip
VALUES: list[Any] = [
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1e308,
    -0.5,
    float("nan"),
    None,
    True,
    "",
    "x",
    [],
    {},
    [[]],
]


def mutated(dice: random.Random, data: bytes) -> bytes:
    """The bytes, damaged in one to four places."""
    out = bytearray(data)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(out) + 1)
        match dice.randrange(6):
            case 0:
                out[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                out[at:at] = dice.choice(NASTY)
            case 2:
                out[at : at + dice.randrange(1, 17)] = dice.choice(NASTY)
            case 3:
                del out[at : at + dice.randrange(1, 33)]
            case 4:
                begin = dice.randrange(len(out) + 1)
                out[at:at] = out[begin : begin + dice.randrange(1, 65)]
            case 5:
                del out[at if dice.random() < 0.2 else len(out) :]
    return bytes(out)


def with_another_value(dice: random.Random, document: bytes) -> bytes:
    """A JSON document in which one value, anywhere, is replaced or removed."""
    root = [json.loads(document)]
    places = list(_places(root))
    holder, key = dice.choice(places[1:])
    if dice.random() < 0.15:
        del holder[key]
    else:
        holder[key] = dice.choice(VALUES)
    return json.dumps(root[0]).encode()


def _places(holder: Any) -> Any:
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, dict | list):
            yield from _places(value)
