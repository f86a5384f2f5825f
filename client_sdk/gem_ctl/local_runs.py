"""Finds the folders of gem-train's runs on this machine. A run's folder holds its server's address while gem-train runs."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from gem_api.process.addresses import is_this_machine
from gem_api.process.files import lock
from gem_api.process.printable import printable
from gem_api.process.regular_file import MAX_BYTES, read_regular

ADMIN_TOKEN = "admin-token"  # in the folder of a run whose server asks for tokens
_FILE = "server.address"


class Announcement:
    """Writes the address of a run's server into the run's folder, until `close`.

    The file is locked meanwhile. If the process is killed, the lock is released, and the file is ignored. If the file system
    has no locks, nothing is written.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._path = folder / _FILE
        self._file: IO[str] | None = None
        with suppress(OSError, ImportError), ExitStack() as opened:
            file = opened.enter_context(self._path.open("a", encoding="utf-8"))
            if lock(file):
                file.truncate(0)
                file.write(f"{address}\n")
                file.flush()
                self._file = file
                opened.pop_all()

    def close(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def find_runs(runs: Path) -> dict[Path, str]:
    """The runs in progress in this folder: each run's folder, and its server's address."""
    addresses = {}
    with suppress(OSError, ImportError):
        for path in sorted(runs.glob(f"*/{_FILE}")):
            if not path.is_file():  # opening a pipe would wait for its writer
                continue
            with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
                address = file.read(1000).strip()
                # gem-train's server runs on this machine: a file with another address must not receive a token.
                if not lock(file, shared=True) and is_this_machine(address):
                    addresses[path.parent] = address
    return addresses


def newest_run(runs: Path) -> Path | None:
    """The folder of the run that was written to last; None if there is no run."""
    times = {}
    with suppress(OSError):
        for options in runs.glob("*/run.json"):
            files = (options, options.with_name("commits.csv"))
            times[options.parent] = max(path.stat().st_mtime for path in files if path.exists())
    return max(times, key=lambda folder: (times[folder], folder.name), default=None)


def outcome(folder: Path) -> str:
    """The outcome of a run of gem-train, as its summary says."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        return printable(str(json.loads(read_regular(folder / "summary.json", MAX_BYTES)).get("outcome") or "failed"))
    return "failed"
