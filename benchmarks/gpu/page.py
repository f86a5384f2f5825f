"""The page of what was measured on GPUs, from stored lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.sections import ROOT
from benchmarks.lib.page import filled, table

RESULTS = ROOT / "docs/results/gpu"
_RESULT = {True: "yes", False: "**no**", None: "skipped"}
_NONE = "**No GPU has been measured yet.** Nothing on this page is a figure of one."


def draw(folder: Path) -> Path:
    """Writes README.md from the folder's *.jsonl, one for each machine. Returns the page's path."""
    runs = {file.stem: list(map(json.loads, file.read_text(encoding="utf-8").splitlines())) for file in folder.glob("*.jsonl")}
    results = "\n\n".join(f"### {name}\n\n{_table(lines)}" for name, lines in sorted(runs.items()))
    return filled(Path(__file__).with_name("page.txt"), folder / "README.md", results=results or _NONE)


def _table(lines: list[dict[str, Any]]) -> str:
    """A row for each check; those that failed come first."""
    lines = sorted(lines, key=lambda line: line["ok"] is not False)
    return table(
        ("Check", "Held", "Figures"), ([line["check"], _RESULT[line["ok"]], ", ".join(_figures(line))] for line in lines)
    )


def _figures(fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The fields of a line, with those within them."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{prefix}{name} ")
        elif name not in ("check", "ok"):
            yield f"{prefix}{name} {value}".replace("|", "\\|").replace("\n", " ")
