"""The page of a report: one HTML file that needs no other. It shows tiles, lists, a table of workers and sections of plots."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MAX_ROWS = 100  # of the table of workers

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1240px; margin: 0 auto; padding: 24px; }
h1 { margin: 0 0 4px; } h2 { margin: 40px 0 4px; border-bottom: 2px solid #1f4e79; padding-bottom: 4px; }
h3 { margin: 0; font-size: 15px; } .quiet { color: #666; } p { margin: 4px 0 12px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.tile { border: 1px solid #ddd; border-radius: 8px; padding: 10px 16px; min-width: 120px; }
.tile b { display: block; font-size: 24px; color: #1f4e79; font-weight: 600; }
.panels { display: grid; gap: 28px 24px; margin-top: 16px; }
.panels { grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); }
.panel svg { width: 100%; height: auto; } .panel p { font-size: 13px; color: #666; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(260px, 100%), 1fr)); gap: 2px 24px; }
dl div { display: flex; gap: 8px; } dt { color: #666; flex: none; } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } th { color: #666; font-weight: normal; text-align: right; }
td, th { padding: 2px 16px 2px 0; } td { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } h1, p, h3 { overflow-wrap: anywhere; }
.note { color: #c0392b; }
@media (max-width: 600px) {
  body { padding: 12px; } .tiles { gap: 8px; } .tile { min-width: 84px; padding: 8px 12px; } .tile b { font-size: 20px; }
}
@media print { body { max-width: none; } .panel { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>GEM run {run}</title>
<style>{style}</style>
</head>
<body>
<h1>Run {run}</h1>
<p class="quiet">{subtitle}</p>
<div class="tiles">{tiles}</div>
{parts}
<p class="quiet">{footer}</p>
</body>
</html>
"""


@dataclass(frozen=True)
class Picture:
    """A plot with its title and how to read it. `svg` is empty if there was nothing to draw."""

    title: str
    description: str
    svg: str


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
    return _PAGE.format(
        run=html.escape(content.run),
        style=_STYLE,
        subtitle=html.escape(content.subtitle),
        tiles="".join(f'<div class="tile"><b>{html.escape(text)}</b>{html.escape(name)}</div>' for name, text in content.tiles),
        parts="\n".join(filter(None, parts)),
        footer=html.escape(content.footer),
    )


def clock(at: float) -> str:
    """Unix seconds as a date and time in UTC; a dash if no calendar has them."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "–"


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in re.split(r"(\d+)", name)]


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
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows[:_MAX_ROWS])
    more = f'<p class="quiet">and {len(rows) - _MAX_ROWS} more</p>' if len(rows) > _MAX_ROWS else ""
    return f'<h2>Workers</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>{more}'


def _section(section: Section) -> str:
    blocks = [
        f'<div class="panel"><h3>{html.escape(one.title)}</h3><p>{html.escape(one.description)}</p>{one.svg}</div>'
        for one in section.pictures
        if one.svg
    ]
    if not blocks:
        return ""
    return (
        f'<h2>{html.escape(section.title)}</h2><p class="quiet">{html.escape(section.description)}</p>'
        f'<div class="panels">{"".join(blocks)}</div>'
    )
