"""The parts of a dashboard: panels, their queries to Prometheus, and the marks across them. `boards` puts them together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a panel is drawn."""

    LINES = "lines"
    HEATMAP = "heatmap"  # its one query gives a histogram's buckets, by `le`
    NUMBER = "number"  # the newest value


@dataclass(frozen=True)
class Query:
    """A query to Prometheus.

    Attributes:
        expr: The query in PromQL.
        legend: The name of its series; {{label}} stands for a label's value.
        dashed: Whether to draw it dashed, as a reference line.
    """

    expr: str
    legend: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Limits:
    """The values at which a number turns orange and red; otherwise it is green.

    Attributes:
        orange: Look at it when there is time.
        red: Look at it now.
        falling: Whether low values are bad: then a value below a limit gets its colour.
    """

    orange: float
    red: float
    falling: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot or number of a dashboard.

    Attributes:
        title: What it shows.
        description: How to read it, and what a good value looks like.
        queries: The series to draw.
        unit: The unit of the values, as Grafana names it.
        kind: How it is drawn.
        log: Whether the value axis is logarithmic.
        most: Upper end of the value axis, if there is a natural one.
        limits: When a value is orange or red, if some values are always bad.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    log: bool = False
    most: float | None = None
    limits: Limits | None = None


@dataclass(frozen=True)
class Dashboard:
    """One page of panels. With `alerts`, it begins with the firing alerts."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    alerts: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: a mark across all panels.

    Attributes:
        name: What happened.
        expr: A PromQL query that has a result at the times when it happened.
        colour: The colour of the marks.
        shown: Whether the marks are visible by default.
    """

    name: str
    expr: str
    colour: str
    shown: bool = True
