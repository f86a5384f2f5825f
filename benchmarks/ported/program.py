"""A program of others: where it is, how it is run, and our difference to it.

A folder of `programs/` has `program.toml`; `setup.diff`, which reduces the program with and without our difference to what two
cores do in a minute; and `port.diff`, our difference to the reduced program. Both are made by `git diff --no-index -U0`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.lib.launch import RunFailed

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Program:
    """What `program.toml` holds."""

    name: str
    about: str  # what it is, in one line
    repository: str  # its address
    commit: str
    script: str  # its path there; it runs in its folder
    loss: str  # a regular expression, whose group is a training loss that it prints
    quality: str  # the same for its quality, of which the last counts
    metric: str  # what the quality is called
    licence: str
    higher: bool = True  # whether more quality is better
    files: list[str] = field(default_factory=list)  # paths of more files and folders that it needs
    packages: list[str] = field(default_factory=list)  # that it needs besides this project's, as "name==version"
    arguments: str = ""  # `{seed}` stands for the worker's seed, `{data}` for the folder of MNIST's files
    server: str = "--until-stopped"  # the options of its servers: the length of the run
    servers: int = 1  # one for each model; `port.diff` calls them 127.0.0.1:50051, 127.0.0.1:50052 and so on
    data: bool = False  # whether it needs MNIST's files
    together: bool = True  # whether three workers wait for each other at the beginning; False: the server deals no samples
    seeds: int = 1
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)  # `arguments` and `server` of "three", "longer" ...
    notes: list[str] = field(default_factory=list)  # what one should know to read its figures; the same for several programs

    @property
    def folder(self) -> Path:
        return PROGRAMS / self.name

    @property
    def address(self) -> str:
        """Of the script, at its commit."""
        return f"{self.repository}/blob/{self.commit[:10]}/{self.script}"

    @property
    def lines(self) -> int:
        """Number of lines that our difference removes and adds."""
        return changed_lines((self.folder / "port.diff").read_text(encoding="utf-8"))

    def settings(self, kind: str) -> tuple[str, str]:
        """The command lines of the program and of its server in this kind of run."""
        own = self.kinds.get(kind, {})
        return own.get("arguments", self.arguments), own.get("server", self.server)

    def losses(self, printed: str) -> list[float]:
        return [float(loss) for loss in re.findall(self.loss, printed)]

    def final_quality(self, printed: str) -> float:
        """Raises RunFailed if it printed none."""
        found = re.findall(self.quality, printed)
        if not found:
            raise RunFailed(f"{self.name} printed nothing like {self.quality!r}: {printed.strip()[-200:]!r}")
        return float(found[-1])

    def require_packages(self) -> None:
        """Raises RunFailed if a package that it needs is missing, or has another version."""
        missing = [package for package in self.packages if _installed(package) != package]
        if missing:
            raise RunFailed(f"{self.name} needs {' '.join(missing)}: pip install --no-deps {' '.join(missing)}")


def load(name: str) -> Program:
    """The program with this name. Raises TypeError if a field is missing or unknown."""
    body: dict[str, Any] = tomllib.loads((PROGRAMS / name / "program.toml").read_text(encoding="utf-8"))
    return Program(name=name, **body)


def names() -> list[str]:
    return sorted(path.parent.name for path in PROGRAMS.glob("*/program.toml"))


def changed_lines(diff: str) -> int:
    """Number of lines that a unified difference without context removes and adds."""
    hunks = re.findall(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", diff, re.MULTILINE)
    return sum(int(count or 1) for hunk in hunks for count in hunk)


def _installed(package: str) -> str:
    name = package.partition("==")[0]
    try:
        return f"{name}=={version(name)}" if "==" in package else name
    except PackageNotFoundError:
        return ""
