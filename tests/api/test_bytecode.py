"""A .pyc file that was cut: the command starts without it. An EOFError is not taken for the end of the user's input."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import click
import gem_api
import pytest
from click.testing import CliRunner
from gem_api.process.options import WithHeadings
from kit.process import python

PROGRAM = """
from gem_api.process.lifetime import long_imports
with long_imports():
    import damaged_module
print(damaged_module.VALUE)
"""
HEADER = 16  # bytes of a .pyc file before the code


def start(folder: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", PROGRAM, PYTHONPATH=str(folder))


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    (tmp_path / "damaged_module.py").write_text("VALUE = 7\n")
    py_compile.compile(str(tmp_path / "damaged_module.py"))
    return Path(importlib.util.cache_from_source(str(tmp_path / "damaged_module.py")))


@pytest.mark.long
@pytest.mark.parametrize("rest", [b"", b"\xe3\x00", b"N", bytes(40)], ids=["nothing", "cut", "no code", "zeros"])
def test_a_damaged_module_is_deleted_and_said_once(rest: bytes, cached: Path, tmp_path: Path) -> None:
    cached.write_bytes(cached.read_bytes()[:HEADER] + rest)
    done = start(tmp_path)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert f"the compiled module {cached} is damaged: deleted it" in line
    again = start(tmp_path)
    assert (again.stdout, again.stderr) == ("7\n", "")


@pytest.mark.long
def test_a_module_that_all_commands_need_first_may_be_damaged_too(tmp_path: Path) -> None:
    copy = tmp_path / "gem_api"
    shutil.copytree(Path(gem_api.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    py_compile.compile(str(copy / "process" / "logs.py"))
    os.truncate(importlib.util.cache_from_source(str(copy / "process" / "logs.py")), HEADER + 9)
    program = "from gem_api.process.command import gem_server; gem_server()"
    done = python("-c", program, "--version", PYTHONPATH=str(tmp_path))
    assert (done.returncode, "version" in done.stdout) == (0, True), done.stderr
    assert "is damaged: deleted it" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["gem-server", "gem-worker", "gem-train", "gem-evaluator", "gem-ctl"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_help_that_can_not_be_printed_is_one_line(name: str) -> None:
    program = f"from gem_api.process.command import {name.replace('-', '_')} as main; main()"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program, "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"{name}: can't write to standard output: No space left on device\n" or name == "gem-ctl"
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("chattr") or os.geteuid() != 0, reason="needs root")
def test_a_damaged_module_that_can_not_be_deleted_is_not_read(cached: Path, tmp_path: Path) -> None:
    cached.write_bytes(cached.read_bytes()[:HEADER])
    if subprocess.run(["chattr", "+i", str(cached)], capture_output=True).returncode:
        pytest.skip("the file system has no immutable files")
    try:
        done = start(tmp_path)
    finally:
        subprocess.run(["chattr", "-i", str(cached)], check=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    assert "going on without compiled modules" in done.stderr


def test_what_ends_too_early_is_no_answer_of_the_user() -> None:
    @click.command(cls=WithHeadings)
    def command() -> None:
        raise EOFError("marshal data too short")

    result = CliRunner().invoke(command, [])
    assert "Aborted" not in result.output
    assert isinstance(result.exception, RuntimeError)
    assert "marshal data too short" in str(result.exception)
