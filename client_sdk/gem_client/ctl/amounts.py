"""Numbers as people write them on a command line: 124M parameters, 32G of memory."""

from __future__ import annotations

import re
from typing import Any

import click
from gem_api.layout import MAX_PARAMETERS

_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class Count(click.ParamType[int]):
    """A number with an optional suffix k, M, B (or G) or T: powers of 1,000, in upper or lower case."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", str(value).strip().upper())
        count = float(match[1]) * _POWERS[match[2]] if match else 0.0
        if not 1 <= count <= MAX_PARAMETERS:
            self.fail(f"{value!r} is not a number of parameters from 1 to 1T; write 156450, 124M or 1B", param, ctx)
        return int(count)


_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Bytes(click.ParamType[int]):
    """A size of memory, at least 1 byte: a number with an optional suffix K, M, G or T, powers of 1,024."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", str(value).strip().upper())
        size = float(match[1]) * 1024 ** _UNITS[match[2]] if match else 0.0
        if not 1 <= size < 1 << 63:
            self.fail(f"{value!r} is not a size of memory; write 32G or 512M", param, ctx)
        return int(size)
