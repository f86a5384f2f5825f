"""The page of a run, one HTML file: the server serves it live, and with the data of a run in it, it is the run's report."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

_EMPTY = '<script type="application/json" id="data"></script>'
_HEAD = '<meta charset="utf-8">\n'
_NOT_IN_HTML = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&"}  # JSON has them in strings alone


def live_page() -> str:
    """The page that asks its server for what it shows."""
    return files("gem_api").joinpath("run_page.html").read_text(encoding="utf-8")


def report_page(data: dict[str, Any]) -> str:
    """The page that shows `data` and loads nothing. Texts in there may hold anything: the page shows them as text."""
    page = live_page()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy(page)}">\n'
    inlined = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_NOT_IN_HTML)
    assert page.count(_EMPTY) == page.count(_HEAD) == 1
    return page.replace(_HEAD, _HEAD + policy).replace(_EMPTY, _EMPTY.replace("><", f">{inlined}<"))


def content_policy(page: str) -> str:
    """The Content-Security-Policy by which the page may run its own script and style, and nothing else."""
    script, style = (_hash(page, tag) for tag in ("script", "style"))
    return f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(page: str, tag: str) -> str:
    """The hash by which a content security policy knows the page's one element of that name without attributes."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
