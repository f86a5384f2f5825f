"""The character transformer: its text, its model, a run through gem-train, and the text that the trained model writes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from gem_worker.process.trainer import optimizer_of
from gem_worker.tasks import TaskError
from kit.settings import configured
from safetensors.torch import save_file
from torch import nn

from examples.character_transformer.model import CHARACTERS, CONTEXT, CharacterTransformer, decode
from examples.character_transformer.sample import main as sample
from examples.character_transformer.task import Characters, CharactersOwnAdamW

ROOT = Path(__file__).parents[2]
TASK = "examples.character_transformer.task"
PATIENCE = 240.0


def write_texts(folder: Path, count: int = 12) -> Path:
    """Files of one repeated letter each, so that a window shows which file it is from."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:02d}.txt").write_text(chr(ord("a") + number) * (40 + number))
    return folder


def letters(tokens: torch.Tensor) -> set[str]:
    return set(decode(tokens.flatten())) - {"\n"}


def test_targets_are_the_characters_that_follow_and_no_character_is_left_out(tmp_path: Path) -> None:
    inputs, targets = Characters(write_texts(tmp_path / "texts")).training_data().tensors
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = decode(torch.cat([inputs[0, :1], targets.flatten()]))
    assert text in "\n".join(chr(ord("a") + number) * (40 + number) for number in range(12) if number % 10)
    assert len(text) > 400


def test_every_tenth_file_is_held_out_as_a_whole(tmp_path: Path) -> None:
    task = Characters(write_texts(tmp_path / "texts"))
    assert letters(task.training_data().tensors[0]) == set("bcdefghijl")
    assert letters(task.test_data().tensors[0]) == set("ak")


@pytest.mark.parametrize("texts", [[], ["long enough " * 20], ["short", "short"]], ids=["none", "one", "short"])
def test_too_little_text_is_an_error_that_says_what_to_do(tmp_path: Path, texts: list[str]) -> None:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
    with pytest.raises(TaskError, match="too little text: give --data a folder with at least two files"):
        Characters(tmp_path)


def test_the_model_has_a_million_parameters_and_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = CharacterTransformer().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_090_848
    tokens = torch.randint(len(CHARACTERS), (2, CONTEXT))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % len(CHARACTERS)
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6), "a character changed the logits of earlier ones"
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_the_rate_of_a_workers_own_optimizer_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARACTERS_LEARNING_RATE", "0.01")
    monkeypatch.setenv("CHARACTERS_WARMUP_STEPS", "4")
    task = CharactersOwnAdamW(write_texts(tmp_path / "texts"))
    model = nn.Linear(1, 1)
    optimizer = optimizer_of(task, model)
    other = optimizer_of(task, nn.Linear(1, 1))
    rates = []
    for _ in range(6):
        model(torch.ones(1)).backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    other.step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.0025), "another worker's warm-up begins with its own first step"


@pytest.mark.parametrize("value", ["fast", "-1", "nan", "inf"])
def test_a_wrong_rate_is_an_error_that_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CHARACTERS_LEARNING_RATE", value)
    with pytest.raises(TaskError, match=f"CHARACTERS_LEARNING_RATE={value} is not a number"):
        optimizer_of(CharactersOwnAdamW(write_texts(tmp_path / "texts")), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("task", "flags"),
    [("Characters", ["--optimizer=adamw", "--learning-rate=0.003"]), ("CharactersOwnAdamW", [])],
    ids=["shared", "own"],
)
def test_it_trains_through_gem_train_and_its_model_writes(tmp_path: Path, task: str, flags: list[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = [
        sys.executable, "-m", "gem_worker.launcher.cli", f"--task={TASK}:{task}", f"--data={texts}",
        f"--runs={tmp_path / 'runs'}", "--workers=2", "--processes=1", "--steps=20", "--batch-size=4",
        configured(evaluate_every=1000), *flags,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GEM_", "CHARACTERS_"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    with (run / "commits.csv").open(newline="") as file:
        first = float(next(csv.DictReader(file))["loss"])
    assert summary["hyperparameters"]["optimizer"] == ("adamw" if flags else "worker")
    assert summary["test_loss"] < first - 0.8, f"the loss went from {first} to {summary['test_loss']}"
    written = CliRunner().invoke(sample, [str(run), "--prompt", "the ", "--length", "60"])
    assert written.exit_code == 0, written.output
    assert written.output.startswith("the ")
    assert set(written.output.split("the ", 1)[1]) - set("\n"), "nothing was written"


def test_a_folder_without_this_model_is_an_error_in_one_line(tmp_path: Path) -> None:
    empty = CliRunner().invoke(sample, [str(tmp_path)])
    assert (empty.exit_code, "has its run ended?" in empty.output) == (1, True)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    other = CliRunner().invoke(sample, [str(tmp_path)])
    assert (other.exit_code, "is not this example's" in other.output) == (1, True)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    torn = CliRunner().invoke(sample, [str(tmp_path)])
    assert (torn.exit_code, "holds no readable model.safetensors" in torn.output) == (1, True)
