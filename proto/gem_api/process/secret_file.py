"""Files that hold a secret: tokens, private keys."""

from __future__ import annotations

from pathlib import Path

OTHERS = 0o007
# What a container runtime puts here is this container's alone, and keeps the mode that it has outside.
MOUNTED = Path("/run/secrets")
FEWEST_CHARACTERS = 16


def require_private(path: Path) -> None:
    """Raises ValueError where other users of this machine can read or change the file, or it can't be looked at."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None
    if mode & OTHERS and path.absolute().parent != MOUNTED:
        raise ValueError(f"other users can read or change {path}: chmod 600 {path}")


def read_secret(path: Path) -> str:
    """The file's text. Raises ValueError where it can't be read, or others can read it too; never quotes it."""
    require_private(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text") from None
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None


def require_token(token: str, where: str) -> str:
    """The token itself. Raises ValueError where it is none: one that can be guessed, or that HTTP can't carry."""
    if len(token) < FEWEST_CHARACTERS:
        raise ValueError(
            f"{where}: a token has at least {FEWEST_CHARACTERS} characters; "
            "make one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: a token is printable ASCII without spaces")
    return token


def read_token(path: Path) -> str:
    """The one token in a file, as a client has it. Raises ValueError."""
    return require_token(read_secret(path).strip(), str(path))
