"""The repository's Markdown pages, and the blocks of code in them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: where it begins, its language ("" if it names none) and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> list[Path]:
    """Every Markdown page that belongs to the repository, whether or not it is committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted({ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()})


def blocks(*, language: str, folder: str = "") -> list[Block]:
    """The blocks in a language, of the pages under a folder."""
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page in pages()
        if page.is_relative_to(ROOT / folder)
        for text in [page.read_text(encoding="utf-8")]
        for match in FENCE.finditer(text)
        if match[1] == language
    ]
