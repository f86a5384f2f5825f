"""Compiled code on disk: what an earlier start left behind may be anything, and costs no start."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from gem_api import compiled

KINDS = ("nbi", "nbc")  # numba's index of a function, and its machine code


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that one start has written."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", str(folder))
        start()(4)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, left_behind: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    shutil.copytree(left_behind, folder)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    monkeypatch.setattr(compiled, "_said", [])
    return folder


def start() -> Any:
    """The function, as a process that starts has it."""

    @compiled.compiled()
    def double(x):  # type: ignore[no-untyped-def]
        return 2 * x

    return double


def loaded(function: Any) -> bool:
    return bool(sum(function.stats.cache_hits.values()))


def cut(size: Callable[[int], int]) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "empty": cut(lambda size: 0),
    "half": cut(lambda size: size // 2),
    "one byte short": cut(lambda size: size - 1),
    "another byte": flip,
    "a pipe": become_a_pipe,
}


@pytest.mark.parametrize(("kind", "damage"), [*(("nbi", damage) for damage in DAMAGES), ("nbc", "one byte short")])
def test_a_damaged_file_is_replaced_and_said_once(
    kind: str, damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = folder.rglob(f"*.{kind}")
    DAMAGES[damage](path)
    function = start()
    assert (function(4), loaded(function)) == (8, False)
    (line,) = caplog.messages
    assert "compiling it anew" in line
    assert str(folder) in line
    again = start()
    assert (again(4), loaded(again)) == (8, True)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_in_the_place_of_a_file_is_left_alone_and_said_once(
    kind: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = folder.rglob(f"*.{kind}")
    path.unlink()
    path.mkdir()
    assert start()(4) == 8
    assert len(caplog.messages) == 1
    assert path.is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_user_is_not_read(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    other = next(folder.rglob(f"*.{kind}"))
    if not mine:  # root's files are trusted
        os.chown(other, 4321, -1)
    function = start()
    assert (function(4), loaded(function)) == (8, False)
    (line,) = caplog.messages
    assert "another user" in line


def test_a_full_disk_costs_no_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    function = start()
    function._cache.flush()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function._cache._cache_file, "_save_data", full)
    assert function(4) == 8
    (line,) = caplog.messages
    assert "No space left" in line


def test_without_a_folder_the_code_is_compiled_at_each_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert start()(4) == start()(4.0) == 8
    (line,) = caplog.messages
    assert "set NUMBA_CACHE_DIR" in line


def test_a_whole_cache_is_used_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gem_api")
    function = start()
    assert (function(4), loaded(function)) == (8, True)
    assert caplog.messages == []
