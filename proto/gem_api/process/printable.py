"""Makes text from outside safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escapes control characters, line breaks and invisible characters, as in "\\x1b" or "\\n"."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
