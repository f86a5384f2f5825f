"""The file of bearer tokens: read at the start, and again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from gem_api.errors import Unauthenticated
from gem_api.process.logs import Logger
from gem_api.process.secret_file import read_secret, require_token

ROLES = ("worker", "evaluator", "admin")


@dataclass(frozen=True)
class Entry:
    """One line of the file.

    Attributes:
        digest: SHA-256 of the token. All digests have the same length, so comparing them reveals nothing about the token's.
        role: The role of its holder.
        worker: The only name that a worker may register with it; empty for any.
    """

    digest: bytes
    role: str
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
        logger: Reports a changed file that can't be used; the previous tokens stay valid.

    Raises:
        ValueError: The file can't be read, other users can read it too, or a line is invalid.
    """

    def __init__(self, path: Path, logger: Logger) -> None:
        self._path = path
        self._logger = logger
        self._seen = self._refused = stamp(path)
        self._entries = parse(read_secret(path), str(path))

    def find(self, token: str) -> Entry:
        """The token's entry, in constant time. Raises Unauthenticated if the token is unknown."""
        self._read_again()
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for entry in self._entries:
            if hmac.compare_digest(digest, entry.digest):
                found = entry
        if found is None:
            raise Unauthenticated("the server does not know this token")
        return found

    def _read_again(self) -> None:
        seen = stamp(self._path)
        if seen == self._seen:
            return
        try:
            self._entries = parse(read_secret(self._path), str(self._path))
        except ValueError as error:
            if seen != self._refused:
                self._logger.warning("can't use the changed token file; the previous tokens stay valid", why=str(error))
            self._refused = seen
            if may_pass(error):
                return  # the next call tries again
        else:
            self._logger.info("tokens reloaded", tokens=len(self._entries))
        self._seen = seen


def stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when the file does; empty if the file can't be read."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def may_pass(error: BaseException) -> bool:
    """Whether a file could not be read for now, as by a process with too many open files; else its content is wrong."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)


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
    if role not in ROLES:
        raise ValueError(f"{place}: the second word is the role, one of {', '.join(ROLES)}")
    worker = worker.strip()
    if worker and role != "worker":
        raise ValueError(f"{place}: only a token of the role worker may have a name")
    require_token(token, place)
    return Entry(hashlib.sha256(token.encode()).digest(), role, "" if worker == "*" else worker)
