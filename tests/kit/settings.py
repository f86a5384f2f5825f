"""Settings without an option, for a command that a test starts."""

from __future__ import annotations

import atexit
import json
import tempfile
from pathlib import Path
from typing import Any

_FOLDER = tempfile.TemporaryDirectory(prefix="gem-settings-")
atexit.register(_FOLDER.cleanup)


def configured(**settings: Any) -> str:
    """The flag --config with a file of these settings."""
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    with tempfile.NamedTemporaryFile("w", suffix=".toml", dir=Path(_FOLDER.name), delete=False, encoding="utf-8") as file:
        file.writelines(lines)
    return f"--config={file.name}"
