"""A Python file holds one idea, in at most 500 lines."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "client_sdk", "deploy", "examples", "proto", "server", "tests", "worker")
MAX_LINES = 500


def too_long(folder: Path) -> dict[str, int]:
    """Number of lines of each Python file below a folder that has too many; generated `*_pb2*.py` files may be longer."""
    lengths = {
        str(path.relative_to(folder)): len(path.read_text(encoding="utf-8").splitlines())
        for path in folder.rglob("*.py")
        if "_pb2" not in path.name
    }
    assert lengths, f"no Python files in {folder}"
    return {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_no_python_file_is_too_long() -> None:
    """Split a long one into files that hold one idea and are named after it; put what they share into a helper beside them."""
    assert [path for folder in FOLDERS for path in too_long(ROOT / folder).items()] == []
