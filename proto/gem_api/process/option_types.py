"""Types of options and settings: which texts are valid, and what they are read as."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS
from gem_api.named_settings import NAMES, parse
from gem_api.process.addresses import server_address
from gem_api.ranges import Range

_SWITCHES = ("1", "0", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n")
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


class Number(click.FloatRange):
    """A finite float in a range; "nan" and "inf" are rejected."""

    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number in a range, called that in help and errors."""

    name = "whole number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


class Bytes(click.ParamType[int]):
    """A number of bytes, with an optional K, M, G or T (powers of 1024)."""

    name = "bytes"
    min = 0

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().upper().removesuffix("B").removesuffix("I")
        try:
            shift = 10 * (1 + "KMGT".index(text[-1])) if text[-1:].isalpha() else 0
            size = int(float(text.rstrip("KMGT")) * 2**shift)
        except (ValueError, IndexError, OverflowError):
            self.fail(f"{value!r} is not a size: write 8G or 512M", param, ctx)
        if size < 0:
            self.fail("a size can't be negative", param, ctx)
        return size


class Times(click.ParamType[str]):
    """Seconds, one number or several between commas; the value is the text, which `times` reads."""

    name = "X,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            times(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time: write seconds, as in 0.1, or several, as in 0.1,0.1,0.4", param, ctx)
        return str(value)


def times(text: str) -> list[float]:
    """The numbers of a `Times`. Raises ValueError if one is no finite number from 0."""
    found = [float(each) for each in text.split(",")]
    if not all(math.isfinite(each) and each >= 0 for each in found):
        raise ValueError(text)
    return found


class Named(click.ParamType[dict[str, Any]]):
    """A name and its settings, as `gem_api.named_settings` reads them: the value is the hyper-parameters that they set."""

    def __init__(self, option: str) -> None:
        self.option = option
        self.name = f"{option}[:key=value,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            return parse(self.option, value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Read(click.ParamType[Any]):
    """A text that a function reads; its ValueError says what is wrong. What is no text is the value already."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class RunToResume(click.Path):
    """The folder of a run. Ignores GEM_RESUME=true, which is meant for a gem-server with the same environment."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        by_variable = ctx and param and param.name and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
        if by_variable and str(value).lower() in _SWITCHES:
            return None
        return super().convert(value, param, ctx)


def private_socket() -> str:
    """The address of a Unix socket without a file, new at each call; empty on systems other than Linux, which have none."""
    return f"@gem-{secrets.token_hex(8)}" if sys.platform == "linux" else ""


def _memory_socket(text: str) -> str:
    if text == "auto":
        return private_socket()
    return "" if text == "off" else text


def _lane_listen(text: str) -> str | None:
    return None if text == "auto" else "" if text == "off" else text


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(address.strip() for address in text.split(",") if address.strip())


SERVER_ADDRESS = Read("host:port", server_address)
ADDRESSES = Read("host:port,...", _addresses)
PART = Read("i/n", Range.parse)
MEMORY_SOCKET = Read("auto|off|path", _memory_socket)
LANE_LISTEN = Read("auto|off|host:port", _lane_listen)


def of_hyperparameter(name: str) -> click.ParamType[Any]:
    """The type that accepts what a hyper-parameter declares."""
    allowed = DECLARATIONS[name].values
    if name in NAMES:
        return Named(name)
    if allowed is None:
        return click.STRING
    if isinstance(allowed, tuple):
        return click.Choice(allowed)
    low, high = (allowed.ge if allowed.gt is None else allowed.gt), (allowed.le if allowed.lt is None else allowed.lt)
    number: Any = Whole if isinstance(DEFAULTS[name], int) else Number
    return number(low, high, min_open=allowed.gt is not None, max_open=allowed.lt is not None)  # type: ignore[no-any-return]
