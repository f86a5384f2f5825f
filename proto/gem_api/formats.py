"""The numbers of the formats that one release writes and another reads. docs/durability.md has the table and its rules.

A format that changes gets the next number here, and its readers keep what they know of the lower ones. A file of a higher
format is left alone: it is not damaged, and no older one takes its place.
"""

from __future__ import annotations

import re
from typing import Any

from gem_api import __version__
from gem_api.errors import InvalidRequest
from gem_api.process.printable import printable

CHECKPOINT = 2
LOG = 2
BACKUP = 2
CONTRACT = 2

CHECKPOINT_FORMAT = f"gem-checkpoint/{CHECKPOINT}"
MAX_STATE_BYTES = 1 << 28  # of a state.json; that of 1,000 workers has 5 MB
_CHECKPOINT = re.compile(r"gem-checkpoint/([1-9][0-9]{0,8})")


def checkpoint_number(state: dict[str, Any]) -> int:
    """The number of a checkpoint's format, from the content of its state.json; 0 if it has none."""
    match = _CHECKPOINT.fullmatch(str(state.get("format")))
    return int(match[1]) if match else 0


def of_another_release(what: object, number: int, known: int, release: object) -> str:
    """Says that something was written in a format that this release does not know, by which release, and what to do."""
    return (
        f"{what} is of format {number}, and this release, {__version__}, reads formats up to {known}: use release "
        f"{named(release)}, which wrote it, or a later one. Nothing was changed"
    )


def not_understood(what: object, why: object, release: object) -> str:
    """Says that something intact is not what this release writes under its format's number."""
    return (
        f"{what} is intact, but this release, {__version__}, does not understand it: {why}. Use release {named(release)}, "
        "which wrote it. Nothing was changed"
    )


def require_known_contract(number: int, release: str) -> None:
    """Raises InvalidRequest if a client speaks a higher contract than this server. 0 means 1."""
    if number > CONTRACT:
        raise InvalidRequest(
            f"this client, of release {named(release)}, speaks contract {number}, and this server, of release {__version__}, "
            f"up to {CONTRACT}: upgrade the server, or use a client of its release"
        )


def outdated(what: str, number: int, release: str) -> str:
    """Says that the other side of a connection is of an earlier release; empty if it is not. It is served all the same."""
    number = max(1, number)
    if number >= CONTRACT:
        return ""
    return (
        f"{what} is of release {named(release)} with contract {number}, and this is release {__version__} with contract "
        f"{CONTRACT}: upgrade {what}"
    )


def named(release: object) -> str:
    """A release's name from a file, to be printed."""
    return printable(str(release)[:40]) if release else "(unknown)"
