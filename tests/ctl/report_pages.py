"""Histories as a server writes them, and a report's page, parsed and as a text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gem_api import __version__
from gem_api.history import COLUMNS
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import page

BEGIN = 1_700_000_000.0  # Unix seconds
_LOCAL = {
    "on": "local", "ray_address": "auto", "ray_labels": "", "ray_spread": False, "resources": "CPU=1", "working_dir": None,
}  # fmt: skip


def line(version: int, worker: str = "a", staleness: int = 0, discarded: int = 0, **changes: Any) -> str:
    """A line of a history; ten commits a second."""
    values = {"loss": 1 / version, "samples": 8, "pi_median": 0.5, "pi_zero_ratio": 0.25, "pi_max_ratio": 0.125}
    values |= {"proxy_energy": 1e-4, "central_energy": 2e-4, "unix_seconds": BEGIN + version / 10, **changes}
    name = f'"{worker.replace(chr(34), 2 * chr(34))}"' if set(worker) & set(',"') else worker
    known = {"version": version, "ticket": version, "worker": name, "sequence": 1, "discarded": discarded}
    return ",".join(str((known | {"staleness": staleness} | values)[column]) for column in COLUMNS)


def in_turn(commits: int, workers: int) -> list[str]:
    """The lines of workers of equal speed, which commit one after the other."""
    return [line(number, f"w-{(number - 1) % workers}", min(number, workers) - 1) for number in range(1, commits + 1)]


def history(path: Path, lines: list[str], end: str = "\r\n") -> Path:
    path.write_text("\r\n".join([",".join(COLUMNS), *lines]) + end, encoding="utf-8", newline="")
    return path


def complete_run(folder: Path) -> Path:
    """Makes the folder of a complete run of gem-train with 3 workers and 300 commits."""
    folder.mkdir(parents=True)
    history(folder / "commits.csv", in_turn(300, 3))
    scores = [{"version": 100, "loss": 0.5, "accuracy": 0.8}, {"version": 300, "loss": 0.25, "accuracy": 0.975}]
    summary = {
        "outcome": "complete",
        "run_id": "1a2b3c4d",
        "hyperparameters": {"learning_rate": 0.05},
        "versions": {"gem-ps": "0.1.0"},
    }
    write_json(
        folder,
        run={"task": "digits", "workers": 3, "runs": "/secret", "learning_rate": 0.1, "server_settings": {}, **_LOCAL},
        evaluations=scores,
        summary=summary | {"commits_via": {"memory": 2, "tcp": 1}},
    )
    return folder


def write_json(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


class Parsed(HTMLParser):
    """A page's elements, and the texts in their order, each with the elements that it is in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> ends nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self._open), data))

    def of(self, tag: str) -> list[str]:
        """The texts directly within elements of a kind."""
        return [text for within, text in self.texts if within[-1:] == (tag,)]


def parsed(path: Path) -> Parsed:
    return Parsed(page(read_run(path, in_progress=False), BEGIN))


def as_text(path: Path, now: float = BEGIN) -> str:
    """What a report shows, line by line. Of a plot it has the names and the axis; the numbers are Matplotlib's choice."""
    text = page(read_run(path, in_progress=False), now).partition("<body>")[2]
    text = re.sub(r"<svg.*?</svg>", lambda svg: f"<p>[plot: {', '.join(_words(svg[0]))}]</p>", text, flags=re.DOTALL)
    for pattern, shown in _SHOWN.items():
        text = re.sub(pattern, shown, text, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return re.sub(r"\n\s*\n+", "\n", text).strip().replace(f"gem-ps {__version__}.", "gem-ps VERSION.") + "\n"


def _words(svg: str) -> list[str]:
    """The texts of a plot that have a letter."""
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if re.search(r"[^\W\d_]", text)]


_SHOWN: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"<script>.*?</script>": "",
    r"<b[^>]*>(.*?)</b>(.*?)</div>": r"\n[\2: \1]",
    r'<i class="(\w+)"></i>(.*?)</span>': r"\n(\2: colour \1)",
    r"</dt><dd>": ": ",
    r"</t[dh]><t[dh][^>]*>": " | ",
    r"<h([123])[^>]*>": lambda found: "\n" + "#" * int(found[1]) + " ",
    r"<li[^>]*>": "\n! ",
    r"<(p|tr|div)[ >]": lambda found: f"\n{found[0]}",
}  # a tag, and what stands for it
