"""examples/lora: the layer's equations, and the example's commands from pretraining to the merged model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.examples import PATIENCE, ROOT
from kit.settings import configured
from safetensors.torch import load_file
from torch import nn

from examples.lora.digits import NEW, RANK, accuracy, images, load_base, perceptron
from examples.lora.lora import Lora, merged, with_adapters

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def adapted() -> tuple[nn.Sequential, nn.Sequential]:
    """A base, and its copy with adapters that were moved away from zero."""
    torch.manual_seed(1)
    base, copy = perceptron(), perceptron()
    copy.load_state_dict(base.state_dict())
    model = with_adapters(copy, 3)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, Lora):
                layer.up.normal_(0, 0.1)
    return base, model


def test_adapters_begin_as_the_base() -> None:
    base = perceptron()
    expected = base(X)
    torch.testing.assert_close(with_adapters(base, 3)(X), expected, rtol=0, atol=0)


def test_a_layer_is_the_equation_of_the_paper() -> None:
    layer = Lora(nn.Linear(64, 7), 2, scale=3.0)
    with torch.no_grad():
        layer.up.normal_()
    expected = X @ layer.base.weight.T + layer.base.bias + 3 / 2 * X @ layer.down.T @ layer.up.T
    torch.testing.assert_close(layer(X), expected)


def test_merging_keeps_the_function_and_the_bases_size() -> None:
    base, model = adapted()
    before = model(X).detach()
    assert not torch.allclose(before, base(X)), "the adapters do nothing"
    whole = merged(model)
    torch.testing.assert_close(whole(X), before, rtol=1e-4, atol=1e-5)
    assert [tuple(p.shape) for p in whole.parameters()] == [tuple(p.shape) for p in base.parameters()]


def run(*command: str) -> str:
    """What a command prints, run from the top folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, timeout=2 * PATIENCE, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.timeout(600)
def test_two_workers_teach_the_base_new_digits(tmp_path: Path) -> None:
    folder, runs = tmp_path / "base", tmp_path / "runs"
    assert "of the digits 0 to 4 are right" in run("examples.lora.digits", "pretrain", str(folder))
    base = load_base(folder)
    task = ["--task=examples.lora.digits:Adapter", f"--data={folder}", f"--runs={runs}"]
    settings = ["--epochs=20", "--batch-size=32", "--optimizer=adamw", "--learning-rate=0.004"]
    run("gem_worker.launcher.cli", *task, *settings, "--workers=2", "--processes=1", configured(evaluate_every=60))
    (made,) = runs.iterdir()
    sent = load_file(made / "model.safetensors")
    assert {name.rpartition(".")[2] for name in sent} == {"down", "up"}, "more than the adapters reached the server"
    assert sum(tensor.numel() for tensor in sent.values()) == RANK * (64 + 512 + 512 + 512 + 512 + 10)

    said = run("examples.lora.digits", "merge", str(folder), str(made))
    before, after = map(float, re.findall(r"digits 5 to 9 ([\d.]+)% right before, ([\d.]+)% with", said)[0])
    assert before < 10
    assert after > 75
    whole = perceptron()
    whole.load_state_dict(load_file(folder / "merged.safetensors"))
    assert 100 * accuracy(whole, images(folder, NEW, test=True)) == pytest.approx(after, abs=1.0)
    unchanged = load_base(folder).state_dict()
    assert all(torch.equal(tensor, unchanged[name]) for name, tensor in base.state_dict().items())
