"""Makes text from outside safe to show: on a terminal, or to those who read a log."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """Escapes control characters, line breaks and invisible characters, as in "\\x1b" or "\\n"."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def without_password(text: str) -> str:
    """The text with *** in the place of the names, passwords and keys in its URLs, as in https://***@host/path?***."""
    text = re.sub(r"(?<=://)[^/?#\s]*@", "***@", text)
    return re.sub(r"(://[^\s?]*\?)[^\s#]+", r"\1***", text)
