"""The task: predict the next character of Python's own standard library, or of your texts."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from gem_worker.tasks import TaskError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from examples.character_transformer.model import CONTEXT, CharacterTransformer, encode

HELD_OUT = 10  # every tenth file is validation text
VALIDATION_WINDOWS = 256
SUFFIXES = {".py", ".txt", ".md"}


class Characters:
    """A transformer for text. A sample is a window of `CONTEXT` characters; the targets are the characters that follow each.

    Windows do not overlap, so an epoch sees each character once. Files are held out as a whole: every tenth in the order of
    their names.

    Args:
        data: Folder with your texts (.py, .txt, .md; subfolders too). None: the modules of Python's standard library, whose
            text depends on the version of Python.

    Raises:
        TaskError: The folder has too little text.
    """

    def __init__(self, data: Path | None) -> None:
        files = _texts(data) if data else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._training = _windows(_joined([file for number, file in enumerate(files) if number % HELD_OUT]))
        validation = _windows(_joined(files[::HELD_OUT]))
        if not len(self._training) or not len(validation):
            raise TaskError(
                f"{data or 'the standard library of this Python'} has too little text: give --data a folder with at least two "
                f"files ({', '.join(sorted(SUFFIXES))}), each longer than {CONTEXT} characters"
            )
        spread = torch.linspace(0, len(validation) - 1, min(VALIDATION_WINDOWS, len(validation))).long()
        self._validation = TensorDataset(*validation[spread])

    def model(self) -> nn.Module:
        return CharacterTransformer()

    def training_data(self) -> TensorDataset:
        return self._training

    def test_data(self) -> TensorDataset:
        return self._validation

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy per character, in nats."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.long().flatten())

    def correct(self, model: nn.Module, batch: Any) -> int | None:
        """None: whole windows are never right."""
        return None


class CharactersOwnAdamW(Characters):
    """The same, and each worker makes the steps of an AdamW of its own. gem-train has no flags for what belongs to a worker, so
    these variables set it:

        CHARACTERS_LEARNING_RATE   0.003 unless set
        CHARACTERS_WARMUP_STEPS    steps over which the rate first rises linearly to its value; 0 unless set
    """

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        rate, warmup = _number("CHARACTERS_LEARNING_RATE", 0.003), int(_number("CHARACTERS_WARMUP_STEPS", 0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        done = 0

        def warm_up(*_: Any) -> None:
            nonlocal done
            done += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, done / max(1, warmup))

        optimizer.register_step_pre_hook(warm_up)
        return optimizer


def _texts(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())


def _joined(files: list[Path]) -> Tensor:
    """The tokens of the files, one after the other: uint8, shape (n,)."""
    return encode("\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files))


def _windows(tokens: Tensor) -> TensorDataset:
    """Inputs and targets, each uint8 of shape (windows, CONTEXT); targets are one character further on."""
    if len(tokens) <= CONTEXT:
        return TensorDataset(torch.empty(0, CONTEXT, dtype=torch.uint8), torch.empty(0, CONTEXT, dtype=torch.uint8))
    both = tokens.unfold(0, CONTEXT + 1, CONTEXT)
    return TensorDataset(both[:, :-1], both[:, 1:])


def _number(name: str, default: float) -> float:
    """A variable of the environment. Raises TaskError if it is not a number that is 0 or larger."""
    try:
        value = float(os.environ.get(name) or default)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise TaskError(f"{name}={os.environ[name]} is not a number that is 0 or larger")
    return value
