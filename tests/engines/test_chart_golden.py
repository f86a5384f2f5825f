"""What the chart renders: by default in golden/chart.yaml, and what each values file of ci/ changes in it in golden/NAME.diff.

`kit.golden` says how to write the files anew.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
from engines.chart import CI, Object, rendered, values_of
from gem_api import __version__
from kit import golden

GOLDEN = Path(__file__).parent / "golden"
# What is random, and what is a file of the chart already.
LEFT_OUT = {
    "token-secret.yaml": r"(?<=: )[A-Za-z0-9+/=]{30,}$",
    "server/tls-secret.yaml": r"(?<=: )[A-Za-z0-9+/=]{30,}$",
    "dashboards.yaml": r"(?<=\|-\n)(    .*\n)+",
    "prometheusrule.yaml": r"(?<=groups:\n)( *[- ].*\n)+",
}


def release(values: Object) -> dict[str, list[str]]:
    """The lines of each template, by its path."""
    values = {**values, "fullnameOverride": ""}  # a name of its own would change every other line
    texts = {path: text.strip() + "\n" for path, text in rendered(values).items() if text.strip()}
    for path, pattern in LEFT_OUT.items():
        if path in texts:
            texts[path] = re.sub(pattern, "LEFT OUT\n" if pattern.endswith("+") else "LEFT OUT", texts[path], flags=re.M)
    return {path: text.replace(__version__, "VERSION").splitlines() for path, text in sorted(texts.items())}


def changes(before: list[str], after: list[str]) -> list[str]:
    """The lines that differ, each group with a line around it and without its number, which changes with every other line."""
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


def test_by_default() -> None:
    golden.check(GOLDEN / "chart.yaml", "".join("\n".join([f"# {path}", *lines, ""]) for path, lines in release({}).items()))


@pytest.mark.parametrize("name", CI)
def test_what_a_values_file_changes(name: str) -> None:
    before, after = release({}), release(values_of(name))
    differing = {path: changes(before.get(path, []), after.get(path, [])) for path in sorted(before | after)}
    golden.check(
        GOLDEN / f"{name}.diff", "".join("\n".join([f"# {path}", *lines, ""]) for path, lines in differing.items() if lines)
    )
