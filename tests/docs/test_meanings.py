"""What a reader is told of π is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gem_api.run_page import live_page

ROOT = Path(__file__).parents[2]
(MEANING,) = re.findall(r"π is the (factor .*?, the smaller is π)\.", live_page())


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "docs/glossary.md",
        "docs/guides/first-steps.md",
        "deploy/helm/gem/files/dashboards/rule.json",
    ],
)
def test_pi_has_one_meaning(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8").replace("**", "")
    assert MEANING in text, "say what π is in the words of the report"
