"""Files that hold a secret, where something other than a readable secret is."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
from gem_api.process.secret_file import read_token


def refusal(path: Path) -> str:
    """Why the path was refused, with all that a traceback would show."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        read_token(path)
    return "".join(traceback.format_exception(refused.value))


def test_a_file_that_is_not_text_is_named_and_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"0123456789abcdef\xff")
    path.chmod(0o600)
    said = refusal(path)
    assert "is not a text file in UTF-8" in said
    assert "0123456789abcdef" not in said


def test_a_folder_is_named_with_what_the_system_says(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert "Is a directory" in refusal(tmp_path)
