"""Sphinx's configuration of the documentation site: `make docs` builds it in build/site.

The pages are those of the repository, in their place. docs/README.md lists them, and the site's menu is made from it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from posixpath import join, normpath

from sphinx.application import Sphinx

project = "GEM parameter server"
project_copyright = ""
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "docs/**.rst", "examples/**README.md", "benchmarks/README.md",
    "deploy/custom-worker/README.md", "deploy/helm/gem/README.md",
]  # fmt: skip
myst_heading_anchors = 4
smartquotes = False  # they would make a dash of the two of an option
autodoc_typehints = "description"
# The trainers, of which the API's reference needs nothing but their names.
autodoc_mock_imports = ["pytorch_lightning", "lightning", "transformers", "accelerate"]
napoleon_use_ivar = True
autodoc_member_order = "bysource"

html_search_scorer = str(Path(__file__).with_name("search_order.js"))
html_theme = "furo"
html_title = project
html_copy_source = html_show_sourcelink = html_show_copyright = False

_INDEX = "docs/README.md"
# Pages with a list of those beside them.
_LISTS = {"docs/decisions/README": "0*", "examples/README": "*/README"}
_NOT_SEARCHED = "docs/decisions/"  # for who changes the code; users find them from the menu


def _menu(index: str) -> str:
    """A table of contents for each section of the index, of the pages that it links to, in its order."""
    menu = ""
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        links = re.findall(r"\[([^]]+)\]\(([^)#]+)\.(?:md|rst)\)", section)
        pages = [f"{name} <{normpath(join('docs', target))}>" for name, target in links]
        menu += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])
    return menu


def _add_menu(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += _menu((Path(app.srcdir) / _INDEX).read_text(encoding="utf-8"))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\nAll pages <{_INDEX.removesuffix('.md')}>\n```\n"
    if pages := _LISTS.get(page):
        source[0] += f"\n```{{toctree}}\n:glob:\n:maxdepth: 1\n\n{pages}\n```\n"
    if page.startswith(_NOT_SEARCHED):
        source[0] = f"---\nno-search: true\n---\n{source[0]}"


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Says the level of the menu's headings, lets the keyboard scroll long lines of code, and adds the front page."""
    if error is not None:
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        text = text.replace('role="heading">', 'role="heading" aria-level="2">').replace("<pre>", '<pre tabindex="0">')
        page.write_text(text, encoding="utf-8")
    shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Adds the menu to the front page, the repository's README, and that page under the name that web servers look for."""
    app.connect("source-read", _add_menu)
    app.connect("build-finished", _finish)
