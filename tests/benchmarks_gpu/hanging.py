"""A section that never ends."""

from __future__ import annotations

from benchmarks_gpu.sections_to_run import start

from benchmarks.gpu.checks import Checks


def run(checks: Checks) -> None:
    start(checks).wait()
