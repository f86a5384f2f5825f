"""Files that hold a secret: tokens, private keys."""

from __future__ import annotations

from pathlib import Path

OTHERS = 0o007  # file mode bits of users who are neither the owner nor in the group
# Container runtimes mount secrets here, for this container only. The files keep the mode that they have outside.
MOUNTED = Path("/run/secrets")
MIN_TOKEN_LENGTH = 16


def require_private(path: Path) -> None:
    """Raises ValueError if other users of this machine can read or change the file, or if it can't be read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from error
    if mode & OTHERS and path.absolute().parent != MOUNTED:
        raise ValueError(f"other users can read or change {path}: chmod 600 {path}")


def read_secret(path: Path) -> str:
    """Reads the file. Raises ValueError, which never quotes the content, if it can't be read or other users can access it."""
    require_private(path)
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from error


def require_token(token: str, where: str) -> str:
    """Returns the token. Raises ValueError if it is too short to be safe, or holds characters that HTTP headers can't carry."""
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(
            f"{where}: a token must have at least {MIN_TOKEN_LENGTH} characters; "
            "generate one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: a token must be printable ASCII without spaces")
    return token


def read_token(path: Path) -> str:
    """Reads a client's file, which holds one token. Raises ValueError as `read_secret` and `require_token`."""
    return require_token(read_secret(path).strip(), str(path))
