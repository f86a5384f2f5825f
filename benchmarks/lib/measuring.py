"""What measurements share: their options, interleaved repeats, and medians that are compared with a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
from gem_api.process.lifetime import interruptible

from benchmarks.lib.page import short

K = TypeVar("K")
V = TypeVar("V")

_HELP = {
    "parameters": "P, the size of the model.",
    "workers": "Number of workers, or of sessions that commit without pause.",
    "transport": "How tensors travel.",
    "seconds": "Length of each measurement.",
    "repeats": "Measurements of each kind, interleaved.",
    "folder": "Folder on the disk to measure.",
    "out": "Where the figures are written.",
}
HEADS = {  # of a column with a figure, and what the figure is multiplied by
    "rate": ("commits/s", 1.0), "p50": ("p50 ms", 1e3), "p99": ("p99 ms", 1e3), "server_cpu": ("server CPU ms", 1e3),
    "server_bytes": ("server MiB", 2**-20), "bytes_per_session": ("MiB a session", 2**-20), "up": ("up Mbit/s", 1e-6),
    "down": ("down Mbit/s", 1e-6),
}  # fmt: skip
_SHORT = {"parameters": ["-P"], "workers": ["-W"]}


def measurement(**defaults: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function, with the options named, and their defaults. A default that is a tuple: several values."""

    def command(function: Callable[..., None]) -> click.Command:
        found = interruptible()(function)
        for name, default in reversed(defaults.items()):
            several = isinstance(default, tuple)
            kind: Any = type(default[0] if several else default)
            if name == "transport":
                kind = click.Choice(("shm", "tcp"))
            elif isinstance(default, Path):
                kind = click.Path(path_type=Path)
            option = click.option(
                f"--{name}", *_SHORT.get(name, ()), multiple=several, type=kind, default=default, help=_HELP[name]
            )
            found = option(found)
        return click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})(found)

    return command


def interleaved(kinds: Sequence[K], repeats: int, measure: Callable[[K], V]) -> dict[K, list[V]]:
    """Measures every kind once in each repeat, and every second repeat in reverse order."""
    measured: dict[K, list[V]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        for kind in kinds if repeat % 2 == 0 else reversed(kinds):
            measured[kind].append(measure(kind))
    return measured


def middle(of: Iterable[Any], figure: str) -> float:
    """The median of a figure over the repeats."""
    return float(median(getattr(each, figure) for each in of))


def medians(of: Sequence[Any], figures: Iterable[str]) -> list[str]:
    """The cells of a table, in the units of `HEADS`."""
    return [short(HEADS[figure][1] * middle(of, figure)) for figure in figures]


def heads(figures: Iterable[str]) -> list[str]:
    return [HEADS[figure][0] for figure in figures]


def ratio(of: Iterable[Any], to: Iterable[Any], figure: str = "rate") -> tuple[float, float, float]:
    """Median, lowest and highest ratio of a figure, one for each repeat."""
    ratios = [getattr(one, figure) / getattr(other, figure) for one, other in zip(of, to, strict=True)]
    return float(median(ratios)), min(ratios), max(ratios)


def spread(ratio: tuple[float, float, float]) -> str:
    """A ratio as text."""
    return f"{ratio[0]:.2f} ({ratio[1]:.2f}..{ratio[2]:.2f})"


def verdict(what: str, least: float, found: tuple[float, float, float]) -> str:
    """A line that compares a ratio with its target."""
    return f"{what}: at least {least:g}, measured {spread(found)}: {'met' if found[0] >= least else 'NOT met'}"
