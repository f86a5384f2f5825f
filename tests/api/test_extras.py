"""The message if an optional package is not installed."""

from __future__ import annotations

from kit.process import python

CODE = """
import importlib, sys
sys.modules["torch"] = None  # it can't be imported
for module in ("gem_worker.launcher.cli", "gem_worker.process.cli", "gem_worker.evaluation.evaluator", "gem_client.torch"):
    try:
        importlib.import_module(module).main([])
    except (SystemExit, ModuleNotFoundError) as error:
        print(error)
"""


def test_without_pytorch_each_command_and_the_sdks_module_for_it_name_the_extra_in_one_line() -> None:
    """All commands in one process, which can't import PyTorch."""
    done = python("-c", CODE)
    where = "in a clone of this project"
    assert done.stdout.splitlines() == [
        f'gem-train needs torch, which is not installed: pip install ".[demo]" {where}',
        f'gem-worker needs torch, which is not installed: pip install ".[torch]" {where}',
        f'gem-evaluator needs torch, which is not installed: pip install ".[torch]" {where}',
        f'gem_client.torch needs PyTorch: pip install ".[torch]" {where}',
    ], done.stderr
