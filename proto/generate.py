"""Generates the Python code of the contract from the .proto files: `python proto/generate.py [--check]`.

--check writes nothing. It exits with status 1 if the committed code is out of date.
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOM = Path(__file__).parent
SOURCES = sorted(path.relative_to(ROOM) for path in ROOM.glob("gem_api/v1/*.proto"))


def generate(into: Path) -> list[Path]:
    """Writes the generated modules and type stubs below `into`, and returns their paths relative to it."""
    arguments = ["protoc", f"-I{ROOM}", f"--python_out={into}", f"--pyi_out={into}", *map(str, SOURCES)]
    if protoc.main(arguments):
        sys.exit("protoc failed; its message is above")
    return sorted(path.relative_to(into) for path in into.rglob("*_pb2.py*"))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        names = generate(fresh)
        if "--check" not in sys.argv:
            for name in names:
                shutil.copyfile(fresh / name, ROOM / name)
            return
        committed = sorted(path.relative_to(ROOM) for path in ROOM.rglob("*_pb2.py*") if "__pycache__" not in path.parts)
        stale = [name for name in names if name not in committed or not filecmp.cmp(fresh / name, ROOM / name, shallow=False)]
        stale += [name for name in committed if name not in names]
    if stale:
        sys.exit(f"out of date with the .proto files: {', '.join(map(str, stale))}; run `make proto` and commit the result")


if __name__ == "__main__":
    main()
