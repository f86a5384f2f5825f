"""The workflow of a public CI, read by two linters: actionlint for mistakes, zizmor for security."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from release.files import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def complaints(workflow: Path) -> str:
    """What the linters print about a workflow; nothing if both accept it."""
    options = ["--quiet", "--no-progress", "--offline", "--no-config", "--persona=pedantic", "--strict-collection"]
    programs = Path(sys.executable).parent
    actionlint, zizmor = [str(programs / "actionlint")], [str(programs / "zizmor"), *options]
    done = [subprocess.run([*command, str(workflow)], capture_output=True, text=True) for command in (actionlint, zizmor)]
    return "".join(each.stdout + each.stderr for each in done if each.returncode)


def test_the_linters_accept_the_workflow() -> None:
    assert complaints(WORKFLOW) == ""


@pytest.mark.parametrize(
    ("part", "mistake", "complaint"),
    [
        ("startsWith(github.ref", "startsWith(github.reff", 'property "reff" is not defined'),
        ("run: .ci/run", "run: .ci/run ${{ github.head_ref }}", "template-injection"),
        ("checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 #", "checkout@v7 #", "unpinned-uses"),
    ],
)
def test_a_mistake_is_found(part: str, mistake: str, complaint: str, tmp_path: Path) -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    assert part in text
    (tmp_path / "ci.yml").write_text(text.replace(part, mistake), encoding="utf-8")
    assert complaint in complaints(tmp_path / "ci.yml")
