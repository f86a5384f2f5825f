"""A section that fails as a whole, and leaves a child behind."""

from __future__ import annotations

from benchmarks_gpu.sections_to_run import start

from benchmarks.gpu.checks import Checks


def run(checks: Checks) -> None:
    start(checks)
    raise RuntimeError("broken")
