"""The message if an optional package is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


def without(missing: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python in which a package cannot be imported."""
    hide = f"import sys; sys.modules[{missing!r}] = None; "
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("gem-train", "gem_worker.launcher.cli", "demo"),
        ("gem-worker", "gem_worker.process.cli", "torch"),
        ("gem-evaluator", "gem_worker.evaluation.evaluator", "torch"),
    ],
)
def test_without_pytorch_a_command_names_the_extra_in_one_line(command: str, module: str, extra: str) -> None:
    done = without("torch", f"from {module} import main; main([])")
    assert done.returncode == 1
    how = f'pip install ".[{extra}]" in a clone of this project'
    assert done.stderr == f"{command} needs torch, which is not installed: {how}\n"


def test_without_pytorch_the_sdks_module_for_it_names_the_extra() -> None:
    done = without("torch", "import gem_client.torch")
    last = done.stderr.splitlines()[-1]
    assert last == 'ModuleNotFoundError: gem_client.torch needs PyTorch: pip install ".[torch]" in a clone of this project'
