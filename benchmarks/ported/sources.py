"""The programs' sources, which this repository does not hold."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

from benchmarks.lib.launch import RunFailed
from benchmarks.ported.program import Program


def lay_out(program: Program, sources: Path, folder: Path, ported: bool, addresses: list[str]) -> Path:
    """Writes a program into a folder, reduced as its `setup.diff` says, and with our difference if it is `ported`.

    Args:
        sources: The folder of the repositories.
        addresses: Those of the servers, in place of 127.0.0.1:50051 and so on.

    Returns:
        The script's path.

    Raises:
        RunFailed: The repository is missing, or a difference doesn't fit.
    """
    repository = find(program, sources)
    command = ["git", "--git-dir", str(repository), "archive", program.commit, "--", program.script, *program.files]
    packed = subprocess.run(command, capture_output=True)
    if packed.returncode:
        raise RunFailed(f"{program.name}: {packed.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    for name in ("setup.diff", "port.diff") if ported else ("setup.diff",):
        _apply(program.folder / name, folder)
    for number, address in enumerate(addresses if ported else ()):
        for path in _changed(program.folder / "port.diff", folder):
            path.write_text(path.read_text(encoding="utf-8").replace(f"127.0.0.1:{50051 + number}", address), encoding="utf-8")
    return folder / program.script


def find(program: Program, sources: Path) -> Path:
    """The git directory with the program's commit. Raises RunFailed, which says how to get it, if there is none."""
    owner, name = program.repository.rstrip("/").split("/")[-2:]
    folder = sources / f"{owner}+{name}"
    for place in (folder, folder / ".git", folder / "repo"):
        if (place / "objects").is_dir() and _has(place, program.commit):
            return place
    raise RunFailed(f"{folder} has no commit {program.commit[:12]}: git clone {program.repository} {folder}")


def _has(repository: Path, commit: str) -> bool:
    command = ["git", "--git-dir", str(repository), "cat-file", "-e", f"{commit}^{{commit}}"]
    return not subprocess.run(command, capture_output=True).returncode


def _apply(diff: Path, folder: Path) -> None:
    if not diff.exists():
        return
    command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", str(diff.resolve())]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    applied = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if applied.returncode:
        raise RunFailed(f"{diff.parent.name}/{diff.name} does not fit: {applied.stderr.strip()}")


def _changed(diff: Path, folder: Path) -> list[Path]:
    """The files that a difference changes."""
    found = re.findall(r"^\+\+\+ b/(\S+)", diff.read_text(encoding="utf-8"), re.MULTILINE)
    return [folder / path for path in found]
