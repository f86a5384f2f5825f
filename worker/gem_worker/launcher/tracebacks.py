"""The part of a traceback that tells users about their own code."""

from __future__ import annotations

import re
import site
import sysconfig

import gem_api
import gem_client

import gem_worker

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]+)", line \d+, in ')
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")  # how each line of a log begins
_OURS = tuple(package.__path__[0] for package in (gem_worker, gem_api, gem_client))
_LIBRARIES = (*site.getsitepackages(), sysconfig.get_path("stdlib"), "<frozen ")


def users_part(text: str) -> str:
    """The last traceback in `text`, an error or a whole log, from the first line of the user's own code on; empty without one.

    All of it if no line is the user's: a library may fail on what it was given.
    """
    _, header, rest = text.rpartition(_HEADER + "\n")
    if not header:
        return ""
    lines: list[str] = []
    for line in rest.splitlines():
        if _LOG_LINE.match(line):
            break
        lines.append(line)
    files = {number: match[1] for number, line in enumerate(lines) if (match := _FRAME.match(line))}
    own = [number for number, file in files.items() if not file.startswith((*_OURS, *_LIBRARIES))]
    return "\n".join(lines[own[0] if own else 0 :]).rstrip()


def same_failure(one: str, other: str) -> bool:
    """Whether two tracebacks name the same lines of code and the same exception; its message may differ."""
    return _place(one) == _place(other)


def _place(traceback: str) -> list[str]:
    lines = traceback.splitlines()
    frames = [line for line in lines if _FRAME.match(line)]
    raised = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    return [*frames, *raised[:1]]
