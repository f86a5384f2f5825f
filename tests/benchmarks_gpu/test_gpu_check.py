"""The check for one GPU, on a CPU: what fails does not stop the rest, and a section ends with all that it has started."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gem_api.layout import Vector
from kit.server import wait_until

from benchmarks.finals import plan
from benchmarks.finals.apart import Rule
from benchmarks.finals.runs import Outcome, Run, train
from benchmarks.finals.together import Synchronous
from benchmarks.gpu.checks import Checks, Found
from benchmarks.gpu.on_device import DeviceRounds, DeviceRule
from benchmarks.gpu.page import RESULTS, draw
from benchmarks.gpu.sections import ROOT, Runner

P = 50


def broken() -> Found:
    raise ValueError("no luck")


def test_a_check_that_fails_does_not_stop_the_others_and_tells_where() -> None:
    shown: list[str] = []
    checks = Checks("cpu", True, 60, "", shown.append)
    checks.check("one", broken)
    checks.check("two", lambda: {"figure": 1 / 3, "none": float("nan")})
    checks.check("three", lambda: {"ok": None, "skipped": "no GPU"})
    one, two, three = map(json.loads, shown)
    assert (one["check"], one["ok"], one["error"]) == ("one", False, "ValueError: no luck")
    assert one["where"][-1].startswith("test_gpu_check.py:")
    assert (two["ok"], two["figure"], two["none"]) == (True, 0.33333, None)
    assert three["ok"] is None


def test_a_check_is_made_if_its_name_matches_and_time_is_left() -> None:
    shown: list[str] = []
    Checks("cpu", True, 60, "step 1|loop", shown.append).check("d.step 25M", broken)
    assert not shown
    Checks("cpu", True, 5, "step 2|loop", shown.append).check("d.step 25M", broken)
    assert json.loads(shown[0])["skipped"] == "no time is left in this section"


def run_section(module: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines of a section of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    shown: list[str] = []
    runner = Runner(["--device=cpu"], True, shown.append)
    asyncio.run(runner.run({"x": (f"benchmarks_gpu.{module}", limit), "y": ("no_module", limit)}))
    assert runner.outcomes == [("child", True), ("x.section", False), ("y.section", False)]
    return [json.loads(line) for line in shown]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; who reaps it does not matter."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.long
def test_a_section_that_breaks_is_named_its_children_end_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    child, broke, missing = run_section("leaving", 120, monkeypatch)
    wait_until(lambda: is_gone(child["pid"]), "its child has ended")
    assert broke["error"] == "exit status 1"
    assert broke["printed"][-1] == "RuntimeError: broken"
    assert missing["printed"][-1] == "ModuleNotFoundError: No module named 'no_module'"


@pytest.mark.long
def test_a_section_over_its_limit_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    child, late, _ = run_section("hanging", 15, monkeypatch)
    wait_until(lambda: is_gone(child["pid"]), "its child has ended")
    assert late["error"] == "over its limit of 15 s"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.long
def test_parts_of_two_sections_run_on_a_cpu() -> None:
    done = command("--device=cpu", "--quick", "--only=d,b", "--match=SGD over TCP|step 13k, memory$")
    equal, step, summary = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0
    assert (equal["transport"], equal["relative_error"] < 1e-5) == ("tcp", True)
    assert step["transport"] == "memory"
    assert step["ms"]["commit"] > step["ms"]["of these, the server's pass"] > 0
    assert summary["checks"] == 2


@pytest.mark.long
def test_without_a_gpu_what_needs_one_fails_and_the_summary_names_it() -> None:
    done = command("--only=a", "--match=gpu|machine")
    machine, gpu, summary = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert machine["ok"]
    assert not gpu["ok"]
    assert summary["failed"] == ["a.gpu"]


def test_what_starts_the_sections_needs_no_package_of_the_project() -> None:
    code = "import benchmarks.gpu.sections as s, sys; print(sorted(n for n in sys.modules if n.startswith(('gem_', 'torch'))))"
    isolated = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, env=isolated, capture_output=True, text=True)
    assert found.stdout == "[]\n"


def as_array(theta: Any) -> Vector:
    found: Vector = theta.numpy() if isinstance(theta, torch.Tensor) else theta
    return found


class Quadratic:
    """A trainee whose gradients are noisy; its vectors are arrays or tensors."""

    def __init__(self, tensors: bool) -> None:
        start = np.linspace(-1, 1, P, dtype=np.float32)
        self.theta: Any = torch.from_numpy(start.copy()) if tensors else start

    def gradient(self, theta: Any, worker: int, step: int, size: int) -> Any:
        return self.joint(theta, [(worker, step, size)])

    def joint(self, theta: Any, parts: list[tuple[int, int, int]]) -> Any:
        noise = sum(np.random.default_rng((worker, step)).normal(0, 1, P).astype(np.float32) for worker, step, _ in parts)
        found = as_array(theta) - np.float32(1) + noise / np.float32(len(parts))
        return torch.from_numpy(found) if isinstance(theta, torch.Tensor) else found

    def score(self, theta: Any) -> float:
        self.last = as_array(theta).copy()
        return float(np.square(self.last - 1).mean())

    def accuracy(self, theta: Any) -> None:
        return None


@pytest.mark.parametrize("settings", [("ours", plan.BOTH), ("ours", "bound=False"), ("rounds", ""), ("rounds", "team=alone")])
def test_trainings_on_a_device_are_those_of_the_study(settings: tuple[str, str]) -> None:
    run = Run("", "mixed", 8, 0, 12, settings[0], f"rate=0.02 {settings[1]}")
    arrays, tensors = Quadratic(False), Quadratic(True)
    expected: Outcome = train(run, arrays, Rule, Synchronous)
    found = train(run, tensors, DeviceRule, DeviceRounds)
    assert found.gradients == expected.gradients
    np.testing.assert_allclose(tensors.last, arrays.last, atol=1e-4)
    assert np.abs(arrays.last - arrays.theta).max() > 0.05


def test_the_page_is_drawn_from_what_is_stored_with_failures_first(tmp_path: Path) -> None:
    for name in RESULTS.glob("*.jsonl"):
        (tmp_path / name.name).write_text(name.read_text())
    assert draw(tmp_path).read_text() == (RESULTS / "README.md").read_text()
    lines = [{"check": "b.SGD", "ok": True, "ms": {"commit": 2.5}}, {"check": "d.gloo", "ok": False, "error": "a | b"}]
    (tmp_path / "h100.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [line for line in draw(tmp_path).read_text().splitlines() if line.startswith(("| b.SGD", "| d.gloo"))]
    assert rows == ["| d.gloo | **no** | error a \\| b |", "| b.SGD | yes | ms commit 2.5 |"]
