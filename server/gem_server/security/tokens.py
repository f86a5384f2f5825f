"""The file of bearer tokens: read at the start, and again when it changes."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gem_api.errors import Unauthenticated
from gem_api.process.logs import Logger
from gem_api.process.secret_file import read_secret, require_token

from gem_server.security.reloaded import Reloaded


class Role(StrEnum):
    """The roles of callers."""

    WORKER = "worker"
    EVALUATOR = "evaluator"
    ADMIN = "admin"


@dataclass(frozen=True)
class Entry:
    """One line of the file.

    Attributes:
        digest: SHA-256 of the token. All digests have the same length, so comparing them reveals nothing about the token's.
        role: The role of its holder.
        worker: The only name that a worker may register with it; empty for any.
    """

    digest: bytes
    role: Role
    worker: str

    @property
    def owner(self) -> str:
        """The name that leases are bound to. It does not reveal the token. If the entry names a worker, it survives a change of
        the token."""
        if self.worker:
            return f"worker {self.worker}"
        return f"token {hashlib.sha256(b'gem owner' + self.digest).hexdigest()[:16]}"


class TokenFile:
    """Tokens and their roles, one line "TOKEN ROLE [WORKER]" each. Empty lines and lines that begin with # are ignored.

    Args:
        path: The file.
        logger: Told when the file changes.

    Raises:
        ValueError: The file can't be read, other users can read it too, or a line is invalid.
    """

    def __init__(self, path: Path, logger: Logger) -> None:
        self._entries = Reloaded("token file", [path], lambda: parse(read_secret(path), str(path)), logger)

    def find(self, token: str) -> Entry:
        """The token's entry, in constant time. Raises Unauthenticated if the token is unknown."""
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for entry in self._entries.newest():
            if hmac.compare_digest(digest, entry.digest):
                found = entry
        if found is None:
            raise Unauthenticated("the server does not know this token")
        return found


def parse(text: str, where: str) -> tuple[Entry, ...]:
    """The entries of a file's text. Raises ValueError, which names the line and never quotes it."""
    lines = ((f"{where}:{number}", line.split(None, 2)) for number, line in enumerate(text.splitlines(), 1))
    entries = tuple(_entry(place, words) for place, words in lines if words and not words[0].startswith("#"))
    if not entries:
        raise ValueError(f"{where} has no token: write one line for each, TOKEN ROLE [WORKER]")
    if len({entry.digest for entry in entries}) < len(entries):
        raise ValueError(f"{where} has the same token twice")
    return entries


def _entry(place: str, words: list[str]) -> Entry:
    token, role, worker = (*words, "", "")[:3]
    if role not in set(Role):
        raise ValueError(f"{place}: the second word is the role, one of {', '.join(Role)}")
    worker = worker.strip()
    if worker and role != Role.WORKER:
        raise ValueError(f"{place}: only a token of the role worker may have a name")
    require_token(token, place)
    return Entry(hashlib.sha256(token.encode()).digest(), Role(role), "" if worker == "*" else worker)
