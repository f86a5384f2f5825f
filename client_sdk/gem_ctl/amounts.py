"""Numbers as people write them on a command line: 124M parameters, 32G of memory, 10% of the workers."""

from __future__ import annotations

import math
import re
from typing import Any

import click
from gem_api.layout import MAX_PARAMETERS

_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_ROUNDING = 1e-9  # relative error of 1.1 * 1000 as floats


class Count(click.ParamType[int]):
    """A number with an optional suffix k, M, B (or G) or T: powers of 1,000, in upper or lower case."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        count = _whole(str(value))
        if not 1 <= count <= MAX_PARAMETERS:
            self.fail(f"{value!r} is not a number of parameters from 1 to 1T; write 156450, 124M or 1B", param, ctx)
        return count


class Counts(click.ParamType[tuple[int, ...]]):
    """Numbers as those of `Count`, with commas between them: 10,100,1k. Each is at least 1. Converts to each once, in order."""

    name = "counts"

    def __init__(self, what: str, most: int) -> None:
        """Numbers of `what`, such as "workers", each at most `most`."""
        self._what, self._most = what, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        counts = tuple(sorted({_whole(one) for one in str(value).split(",")}))
        if not all(1 <= count <= self._most for count in counts):
            self.fail(f"{value!r} are not numbers of {self._what} from 1 to {self._most:,}; write 100 or 10,100,1k", param, ctx)
        return counts


class BitsPerSecond(click.ParamType[float]):
    """The speed of a link, in bits per second, with an optional suffix k, M, G or T, and "bit" if you like.

    Converts to bytes per second.
    """

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        bits = _number(str(value), unit="(?<!B)(?:BPS|BIT(?:/S)?)")
        if not 1 <= bits <= 1e15:
            self.fail(f"{value!r} is not a number of bits per second; write 10G or 100M", param, ctx)
        return bits / 8


def _whole(written: str) -> int:
    """A whole number with an optional suffix, such as 1.5k; 0 if it is none."""
    number = _number(written)
    return round(number) if math.isfinite(number) and abs(number - round(number)) < _ROUNDING * number else 0


def _number(written: str, unit: str = "") -> float:
    """A number with an optional suffix k, M, B, G or T, and then an optional `unit` (a pattern); 0 if it is none."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([KMBGT]?)(?:{unit})?", written.strip().upper())
    return float(match[1]) * _POWERS[match[2]] if match else 0.0
