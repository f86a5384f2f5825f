"""`make release` says what is missing before it builds anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gem_api import __version__
from kit.pages import ROOT

SOURCES = ("deploy/release/build.py", "proto/gem_api/__init__.py", "CHANGELOG.md")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and what the script reads."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def refusal(repository: Path) -> str:
    """What the script prints where no other program than git is installed."""
    programs = repository / ".git" / "programs"
    programs.mkdir()
    (programs / "git").symlink_to(str(shutil.which("git")))
    script = [sys.executable, "-B", str(repository / "deploy" / "release" / "build.py")]
    done = subprocess.run(script, env={"PATH": str(programs)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not (repository / "dist").exists()
    return done.stderr


def test_all_that_is_missing_is_named_with_how_to_get_it(repository: Path) -> None:
    (repository / "forgotten.py").touch()
    printed = refusal(repository)
    assert "No Docker engine answers. Install it (https://docs.docker.com/engine/install) and start it." in printed
    assert "?? forgotten.py" in printed
    assert "tag" not in printed


def test_a_tag_must_be_the_version_and_the_changelog_must_have_it(repository: Path) -> None:
    subprocess.run(["git", "tag", "v9.9.9"], cwd=repository, check=True)
    printed = refusal(repository)
    assert f"The tag v9.9.9 differs from v{__version__}" in printed
    assert f"CHANGELOG.md has no section for {__version__}" in printed
    assert "last commit" not in printed
