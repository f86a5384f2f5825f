"""What a reader is told of π, and of what is good, is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gem_ctl import run_report

ROOT = Path(__file__).parents[2]
MEANING = run_report.PI.removeprefix("π is the ").rstrip(".")
LIVE = (ROOT / "server/gem_server/telemetry/live.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "docs/tuning.md",
        "docs/glossary.md",
        "docs/guides/first-steps.md",
        "deploy/helm/gem/files/dashboards/rule.json",
    ],
)
def test_pi_has_one_meaning(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8").replace("**", "")
    assert MEANING in text, "say what π is in the words of the report"


def test_the_live_page_says_what_is_good_in_the_words_of_the_report() -> None:
    report = " ".join((ROOT / "client_sdk/gem_ctl/run_report.py").read_text(encoding="utf-8").split())
    report = re.sub(r'" f?"', "", report)
    charts = re.findall(r'title: "([^"]+)".*? good: "([^"]+)"', LIVE)
    assert len(charts) == LIVE.count("{ title:") == 6
    for title, good in charts:
        assert f"Good: {good}" in report, title
