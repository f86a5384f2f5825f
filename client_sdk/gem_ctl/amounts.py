"""Numbers as people write them on a command line: 124M parameters, 32G of memory, 10% of the workers."""

from __future__ import annotations

import math
import re

from gem_api.layout import MAX_PARAMETERS
from gem_api.process.option_types import Read

_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MAX_WORKERS = 1_000_000
_ROUNDING = 1e-9  # relative error of 1.1 * 1000 as floats


def parameters(text: str) -> int:
    """A number of parameters, with an optional suffix k, M, B (or G) or T: powers of 1,000, in upper or lower case."""
    count = _whole(text)
    if not 1 <= count <= MAX_PARAMETERS:
        raise ValueError(f"{text!r} is not a number of parameters from 1 to 1T; write 156450, 124M or 1B")
    return count


def numbers_of_workers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them, such as 10,100,1k: each once, in order."""
    counts = tuple(sorted({_whole(one) for one in text.split(",")}))
    if not all(1 <= count <= _MAX_WORKERS for count in counts):
        raise ValueError(f"{text!r} are not numbers of workers from 1 to {_MAX_WORKERS:,}; write 100 or 10,100,1k")
    return counts


def bytes_per_second(text: str) -> float:
    """The speed of a link, from bits per second, with an optional suffix k, M, G or T, and "bit" if you like."""
    bits = _number(text, unit="(?<!B)(?:BPS|BIT(?:/S)?)")
    if not 1e3 <= bits <= 1e15:
        raise ValueError(f"{text!r} is not a number of bits per second from 1k; write 10G or 100M")
    return bits / 8


PARAMETERS = Read("count", parameters)
WORKERS = Read("counts", numbers_of_workers)
LINK_SPEED = Read("bits", bytes_per_second)


def _whole(written: str) -> int:
    """A whole number with an optional suffix, such as 1.5k; 0 if it is none."""
    number = _number(written)
    return round(number) if math.isfinite(number) and abs(number - round(number)) < _ROUNDING * number else 0


def _number(written: str, unit: str = "") -> float:
    """A number with an optional suffix k, M, B, G or T, and then an optional `unit` (a pattern); 0 if it is none."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([KMBGT]?)(?:{unit})?", written.strip().upper())
    return float(match[1]) * _POWERS[match[2]] if match else 0.0
