"""Every relative link of every page leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.pages import FENCE, ROOT, pages

LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        taken = [slug, *(f"{slug}-{number}" for number in range(1, 100))]
        found.add(next(name for name in taken if name not in found))
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):  # another site
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        page_with_headings = anchor and target.suffix == ".md"
        if not target.exists():
            found.append(f"{link}: no such file")
        elif page_with_headings and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in LINK.findall(index)}
    expected = {page for page in pages() if page.is_relative_to(ROOT / "docs") and page.parent.name != "decisions"}
    assert expected - {ROOT / "docs/README.md"} <= listed
