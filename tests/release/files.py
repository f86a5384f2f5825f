"""What `make release` has left in dist/, and the commit that it comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gem_api import __version__

ROOT = Path(__file__).parents[2]


def released(pattern: str) -> Path:
    """The only file of dist/ that fits the pattern, in which VERSION stands for the project's."""
    found = list((ROOT / "dist").glob(pattern.replace("VERSION", __version__)))
    assert len(found) == 1, f"{pattern}: {len(found)} files in dist/, one expected; `make release` builds it"
    return found[0]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def tracked(*paths: str) -> set[str]:
    """The paths of the files that the last commit has below some paths."""
    return set(git("ls-files", *paths).splitlines())
