"""Tokens for tests, and the token file of a server."""

from __future__ import annotations

from pathlib import Path

ALICE, BOB, ANY, EVALUATOR, ADMIN = (f"{name}-0123456789abcdef" for name in ("alice", "bob", "any", "evaluator", "admin"))
LINES = (f"{ALICE} worker alice", f"{BOB} worker bob", f"{ANY} worker", f"{EVALUATOR} evaluator", f"{ADMIN} admin")


def write_tokens(path: Path, *lines: str) -> Path:
    """Writes a file that only its owner can read; an existing file is overwritten in place."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that carries a token."""
    return (("authorization", f"Bearer {token}"),)
