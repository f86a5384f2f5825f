"""The tokens of a run whose workers come from other machines."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gem_worker.launcher.run_folder import RunFolder


def make_tokens(folder: RunFolder) -> None:
    """Writes the run's tokens into its folder, readable by its owner alone: the server's file, and each client's token.

    A resumed run keeps its tokens, because the leases in its checkpoint belong to them.
    """
    if folder.tokens.exists():
        return
    clients = {"worker": folder.worker_token, "admin": folder.admin_token}
    tokens = {role: secrets.token_hex(32) for role in clients}
    for role, path in clients.items():
        _write_privately(path, f"{tokens[role]}\n")
    _write_privately(folder.tokens, "".join(f"{token} {role}\n" for role, token in tokens.items()))


def _write_privately(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
