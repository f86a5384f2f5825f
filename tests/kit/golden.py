"""Golden files: what a command, a page or a chart renders, as a whole, in a file that one reads in a change's diff.

`GOLDEN=write pytest PATH` writes the files of the tests that it runs anew; read the diff before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path


def check(file: Path, text: str) -> None:
    """Fails if the golden file does not hold this text; writes the file instead if the variable GOLDEN is `write`."""
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"there is no {file}: GOLDEN=write pytest writes it"
    assert text == file.read_text(encoding="utf-8"), f"not as in {file.name}; if it is meant so, run GOLDEN=write pytest"
