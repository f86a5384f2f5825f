"""Runs the sections of the check, each in a process of its own with a time limit: a broken CUDA context or a call that hangs
ends one section alone, and its servers and workers end with it. Needs the standard library alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PACKAGES = ("proto", "server", "client_sdk", "worker")
_CPU_FACTOR = 3.0  # times as long on a CPU
_MAX_LINE_BYTES = 1 << 20

SECTIONS = {  # modules with `run(checks)`, and their limits on a GPU, in seconds; the limits of all are less than nine minutes
    "a": ("benchmarks.gpu.environment", 60.0),
    "b": ("benchmarks.gpu.equality", 150.0),
    "c": ("benchmarks.gpu.digits", 90.0),
    "g": ("benchmarks.gpu.training", 165.0),
    "d": ("benchmarks.gpu.steps", 190.0),
    "f": ("benchmarks.gpu.rates", 115.0),
}
_UNTIMED = "bcg"  # no time is measured there: on a GPU they run at once


@dataclass
class Runner:
    """Runs sections.

    Args:
        options: For the sections, such as `--quick`.
        on_gpu: Whether they may run at once, and have the limits of a GPU.
        show: Receives each line, which is JSON.

    Attributes:
        outcomes: The name and the result of each check: true, false, or null if it was skipped.
    """

    options: Sequence[str]
    on_gpu: bool
    show: Callable[[str], None]
    outcomes: list[tuple[str, bool | None]] = field(default_factory=list)

    async def run(self, sections: Mapping[str, tuple[str, float]]) -> None:
        """Runs these sections. If it is cancelled, as SIGTERM does, they end."""
        if task := asyncio.current_task():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        at_once = [name for name in sections if self.on_gpu and name in _UNTIMED]
        for group in [[name] for name in sections if name not in at_once[1:]]:
            names = at_once if group == at_once[:1] else group
            await asyncio.gather(*(self._run(name, *sections[name]) for name in names))

    async def _run(self, name: str, module: str, limit: float) -> None:
        """Runs a section, at most until its limit, and ends what it has started. If it fails as a whole, a line says so."""
        limit *= 1.0 if self.on_gpu else _CPU_FACTOR
        command = [sys.executable, "-m", "benchmarks.gpu", f"--section={module}", f"--seconds={limit}", *self.options]
        with tempfile.TemporaryFile("w+") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=_environment(), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=errors, start_new_session=True, limit=_MAX_LINE_BYTES,
            )  # fmt: skip
            try:
                await asyncio.wait_for(self._take_all(process.stdout), limit)
                why = f"exit status {await process.wait()}"
            except TimeoutError:
                why = f"over its limit of {limit:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has left behind, too
            if await process.wait():
                errors.seek(0)
                printed = errors.read().strip().splitlines()[-8:]
                self._take(as_line(f"{name}.section", ok=False, error=why, printed=printed))

    async def _take_all(self, lines: asyncio.StreamReader | None) -> None:
        async for line in lines or ():  # type: ignore[union-attr]
            self._take(line.decode())

    def _take(self, line: str) -> None:
        found = json.loads(line)
        self.outcomes.append((found["check"], found["ok"]))
        self.show(line.rstrip())


def as_line(check: str, **fields: Any) -> str:
    """A line of the output: numbers have five digits, and those that JSON lacks are null."""
    text = json.dumps({"check": check, **fields}, default=str)
    rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.5g}"), parse_constant=lambda name: None)
    return json.dumps(rounded, ensure_ascii=False)


def _environment() -> dict[str, str]:
    """The environment of a section: it finds the checkout's packages, which need not be installed, and no setting of the
    caller's reaches its servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
    paths = [str(ROOT), *(str(ROOT / each) for each in _PACKAGES), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}
