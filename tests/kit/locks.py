"""The files that pin packages, beside what the packages say of themselves."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.lock"))


def pins(lock: str) -> dict[str, str]:
    """Version by package, as the lock writes both."""
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def oldest_python() -> str:
    """The oldest Python that pyproject.toml promises: `3.11.0` for `>=3.11`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest,) = re.fullmatch(r">=(\d+\.\d+(?:\.\d+)?)", project["requires-python"]).groups()  # type: ignore[union-attr]
    return f"{oldest}.0" if oldest.count(".") == 1 else str(oldest)


def refusing(lock: str) -> list[str]:
    """The installed packages of a lock that refuse the oldest Python, each with what it asks for.

    Raises:
        PackageNotFoundError: A package of the lock is not installed.
    """
    asked = {name: str(importlib.metadata.metadata(name).json.get("requires_python", "")) for name in pins(lock)}
    return [f"{name} needs {python}" for name, python in asked.items() if oldest_python() not in SpecifierSet(python)]
