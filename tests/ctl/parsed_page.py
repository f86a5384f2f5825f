"""A report's HTML, parsed, and the panels that a report draws."""

from __future__ import annotations

from html.parser import HTMLParser

from ctl.fake_prometheus import NOW, RUN, FakePrometheus
from gem_ctl.dashboards import DASHBOARDS
from gem_ctl.panels import Kind
from gem_ctl.report import Run, page

HOSTILE = """<script>alert("1")</script> 'it''s' & a\\b\\ [x].*+?|(y) {z} $"""
DRAWN = [panel for board in DASHBOARDS for panel in board.panels if panel.kind is not Kind.NUMBER]


class Parsed(HTMLParser):
    """A page's elements, and the text in each kind of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> ends nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def of(self, tag: str) -> list[str]:
        """The texts directly within elements of a kind."""
        return [text for within, text in self.texts if within == tag]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def report(fake: FakePrometheus, run: Run = RUN) -> Parsed:
    return Parsed(page(fake.client, run, NOW))
