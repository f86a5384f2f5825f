"""The page of a report: one HTML file that needs no other. It shows tiles, lists, a table of workers and sections of plots."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from gem_ctl.plots import Plot

_MAX_ROWS = 100  # of the table of workers
_LONG = 10  # characters that fit into a tile in large letters

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>GEM run {run}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Run {run}</h1>
<p class="quiet">{subtitle}</p>
<div class="tiles">{tiles}</div>
{parts}
<p class="quiet">{footer}</p>
</main>
<script>{script}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Picture:
    """A plot with its title and how to read it. `plot` is None if there was nothing to draw."""

    title: str
    description: str
    plot: Plot | None


@dataclass(frozen=True)
class Section:
    """Plots under one heading. A section without any plot is left out."""

    title: str
    description: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Content:
    """What a page shows. All texts are plain; the page escapes them.

    Attributes:
        run: The run's name.
        subtitle: When and where it ran.
        tiles: The main numbers: name and value.
        settings: The run's settings by name.
        sections: The plots.
        footer: How the report was made.
        notes: What the reader has to know first.
        versions: The versions of the software by name.
        columns: The headings of the table of workers, beginning with the worker's name.
        workers: The rows of that table.
    """

    run: str
    subtitle: str
    tiles: Sequence[tuple[str, str]]
    settings: Mapping[str, str]
    sections: Sequence[Section]
    footer: str
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()
    workers: Sequence[Sequence[str]] = ()


def build(content: Content) -> str:
    """The page as HTML."""
    parts = [
        _notes(content.notes),
        *(_section(section) for section in content.sections),
        _table(content.columns, content.workers),
        _list("Settings", content.settings),
        _list("Versions", content.versions),
    ]
    style, script = (files("gem_ctl").joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return _PAGE.format(
        policy=_policy(script),
        run=html.escape(content.run),
        style=style,
        script=script,
        subtitle=html.escape(content.subtitle),
        tiles="".join(_tile(name, text) for name, text in content.tiles),
        parts="\n".join(filter(None, parts)),
        footer=html.escape(content.footer),
    )


def _policy(script: str) -> str:
    """The page may run its own script and loads nothing. A plot's elements have style attributes, which no hash can name."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def clock(at: float) -> str:
    """Unix seconds as a date and time in UTC; a dash if no calendar has them."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "–"


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in re.split(r"(\d+)", name)]


def _tile(name: str, text: str) -> str:
    size = ' class="long"' if len(text) > _LONG else ""
    return f'<div class="tile"><b{size}>{html.escape(text)}</b>{html.escape(name)}</div>'


def _notes(notes: Sequence[str]) -> str:
    rows = "".join(f'<li class="note">{html.escape(note)}</li>' for note in notes)
    return f"<h2>Notes</h2><ul>{rows}</ul>" if rows else ""


def _list(heading: str, texts: Mapping[str, str]) -> str:
    """Names and values, sorted by name."""
    rows = "".join(
        f"<div><dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(value) or '–'}</dd></div>"
        for name, value in sorted(texts.items())
    )
    return f"<h2>{heading}</h2>\n<dl>{rows}</dl>" if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows[:_MAX_ROWS])
    more = f'<p class="quiet">and {len(rows) - _MAX_ROWS} more</p>' if len(rows) > _MAX_ROWS else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    scrolls = 'class="wide" tabindex="0" role="region" aria-labelledby="workers"'  # by the keyboard too
    return f'<h2 id="workers">Workers</h2><div {scrolls}>{table}</div>{more}'


def _section(section: Section) -> str:
    blocks = [_panel(one, one.plot) for one in section.pictures if one.plot]
    if not blocks:
        return ""
    return (
        f'<h2>{html.escape(section.title)}</h2><p class="quiet">{html.escape(section.description)}</p>'
        f'<div class="panels">{"".join(blocks)}</div>'
    )


def _panel(picture: Picture, plot: Plot) -> str:
    """A plot under its title and its legend, which may be empty, and above its description."""
    names = "".join(f'<span><i class="{colour}"></i>{html.escape(name)}</span>' for colour, name in plot.legend)
    return (
        f'<div class="panel"><h3>{html.escape(picture.title)}</h3><div class="legend">{names}</div>'
        f'<div class="plot">{plot.svg}</div><p>{html.escape(picture.description)}</p></div>'
    )
