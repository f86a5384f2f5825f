"""The documentation site builds without a warning: no broken link or anchor, no page that the menu lacks, all of the API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import gem_client
import gem_client.torch
import pytest
from kit.locks import refusing
from telemetry.browser import BROWSER, NAMES, Browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    options = f"-q -W --keep-going -b html -c docs -d {out / 'cache'} . {out / 'html'}".split()
    made = subprocess.run([sys.executable, "-m", "sphinx", *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    return out / "html"


def test_every_page_of_the_index_is_a_page_of_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT).with_suffix(".html") for path in ROOT.glob("docs/guides/*.md")}
    assert len(pages) > 10
    assert [page for page in pages if not (site / page).is_file()] == []


def pages_with_words(site: Path) -> dict[str, set[str]]:
    """The pages of the search's index, by word: in the text (stems) and in headings (as printed)."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.partition("(")[2].rpartition(")")[0])
    found: dict[str, set[str]] = {}
    for word, pages in [*index["terms"].items(), *index["titleterms"].items()]:
        found.setdefault(word, set()).update(index["docnames"][page] for page in ([pages] if isinstance(pages, int) else pages))
    for title, places in index["alltitles"].items():
        found.setdefault(title, set()).update(index["docnames"][page] for page, _ in places)
    return found


def test_the_search_finds_words_of_guides_and_leaves_out_decisions(site: Path) -> None:
    found = pages_with_words(site)
    assert any(page.startswith("docs/") for page in found["straggler"])
    assert "docs/glossary" in found["stale"]
    pages = set().union(*found.values())
    assert len(pages) > 40
    assert {page for page in pages if page.startswith("docs/decisions/")} == set()


def test_the_api_has_every_public_name(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text(encoding="utf-8")
    names = [f"{module.__name__}.{name}" for module in (gem_client, gem_client.torch) for name in module.__all__]
    assert [name for name in names if f'id="{name}"' not in page] == []


@pytest.mark.skipif(BROWSER is None, reason=f"needs a Chromium: none of {', '.join(NAMES)} is installed")
@pytest.mark.parametrize("word", ["durability", "checkpoint", "staleness", "local steps"])
def test_the_search_shows_guides_before_reports_and_no_decision(site: Path, tmp_path: Path, word: str) -> None:
    browser = Browser(tmp_path)
    try:
        browser.open(f"{(site / 'search.html').as_uri()}?q={quote(word)}", 1440)
        browser.until("/matching the search query/.test(document.querySelector('.search-summary')?.textContent)")
        found = json.loads(
            browser.look("JSON.stringify([...document.querySelectorAll('ul.search li > a')].map(a => a.pathname))")
        )
    finally:
        browser.close()
    place = {kind: [at for at, page in enumerate(found) if f"/{kind}/" in page] for kind in ("guides", "results", "decisions")}
    assert max(place["guides"]) < min(place["results"])
    assert place["decisions"] == []


@pytest.mark.parametrize("lock", ["requirements-docs.lock", "requirements-integrations.lock"])
def test_every_pinned_package_accepts_the_oldest_python_that_is_promised(lock: str) -> None:
    assert refusing(lock) == []
