"""numba's `njit` with a cache on disk that is not trusted: if it is damaged, foreign or can't be written, the code is compiled
anew, and one log line says so."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache
from numba.core.dispatcher import Dispatcher

from gem_api.process.regular_file import read_regular

_DIGEST_BYTES = 32
_MAX_BYTES = 1 << 30
_log = logging.getLogger("gem_api")


def compiled(*signatures: Any, **options: Any) -> Callable[[Any], Any]:
    """Decorates a function as `numba.njit` does with `cache=True`. With `signatures`, it is compiled, or loaded, at once."""

    def decorate(function: Any) -> Any:
        dispatcher = njit(**options)(function)
        if not isinstance(dispatcher, Dispatcher):  # NUMBA_DISABLE_JIT
            return dispatcher
        dispatcher._cache = _cache_of(function)  # type: ignore[attr-defined]
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()
        return dispatcher

    return decorate


def _cache_of(function: Any) -> Any:
    try:
        return _Cache(function)
    except (OSError, RuntimeError):  # the second is numba's if it finds no folder
        return _NoCache()


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function. Each ends with the SHA-256 of what precedes it: a file that was cut may still be valid to
    numba, or crash the process."""

    def _load_index(self) -> Any:
        _require_intact(Path(self._index_path))
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        _require_intact(Path(self._data_path(name)))
        return super()._load_data(name)

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BytesIO]:
        content = BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())


def _require_intact(path: Path) -> None:
    """Raises ValueError if the file is damaged, or another user's: what numba reads can run code."""
    if not path.exists():
        return
    if hasattr(os, "geteuid") and path.stat().st_uid not in (0, os.geteuid()):
        raise ValueError("it belongs to another user")
    content = read_regular(path, _MAX_BYTES)
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise ValueError("it is damaged")


class _Names(CompileResultCacheImpl):  # type: ignore[misc]
    """The names of the files differ from numba's own, which have no digest."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}.checked"


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Names

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # anything may be in a file
            _say_once(
                f"compiled code in {self._cache_path} can't be used ({error}): compiling it anew, which takes some seconds"
            )
        try:
            self.flush()  # else `save_overload` would stumble over the same file
        except OSError:
            self.disable()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # such as a full disk
            _say_once(f"compiled code in {self._cache_path} is not kept ({error}): the next start compiles it anew")


class _NoCache(NullCache):  # type: ignore[misc]
    def load_overload(self, sig: Any, target_context: Any) -> None:
        _say_once(
            "no writable folder for compiled code: each start compiles it anew, which takes some seconds; set NUMBA_CACHE_DIR "
            "to a folder that this user may write to"
        )


_said: list[str] = []


def _say_once(line: str) -> None:
    """Logs the first line of this process: the others of a folder have the same cause."""
    if not _said:
        _log.warning(line)
    _said.append(line)
