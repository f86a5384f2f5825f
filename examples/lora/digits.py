"""A network that knows the digits 0 to 4 learns 5 to 9 by adapters alone: see README.md.

python -m examples.lora.digits pretrain FOLDER
gem-train --task examples.lora.digits:Adapter --data FOLDER
python -m examples.lora.digits merge FOLDER runs/...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.lora.lora import merged, with_adapters

RANK = 4
KNOWN, NEW = (0, 4), (5, 9)


class Adapter:
    """The task. Its folder holds the pretrained base and the images; both stay with the worker."""

    def __init__(self, data: Path) -> None:
        self.folder = data

    def model(self) -> nn.Module:
        return with_adapters(load_base(self.folder), RANK)

    def training_data(self) -> TensorDataset:
        return images(self.folder, NEW, test=False)

    def test_data(self) -> TensorDataset:
        return images(self.folder, NEW, test=True)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def correct(self, model: nn.Module, batch: Any) -> int:
        return int((model(batch[0]).argmax(1) == batch[1]).sum())


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def load_base(folder: Path) -> nn.Sequential:
    model = perceptron()
    model.load_state_dict(load_file(folder / "base.safetensors"))
    return model


def images(folder: Path, digits: tuple[int, int], *, test: bool) -> TensorDataset:
    """The 8×8 images of the digits from the first to the last; every fifth is for tests."""
    data = load_file(folder / "digits.safetensors")
    pixels, labels = data["pixels"], data["labels"]
    chosen = (labels >= digits[0]) & (labels <= digits[1]) & ((torch.arange(len(labels)) % 5 == 0) == test)
    return TensorDataset(pixels[chosen], labels[chosen])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    inputs, labels = data[:]
    right: Tensor = model(inputs).argmax(1) == labels
    return float(right.float().mean())


def pretrain(folder: Path) -> None:
    """Trains the base on one machine, without a server."""
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = load_digits(return_X_y=True)
    tensors = {"pixels": torch.from_numpy(pixels).float() / 16, "labels": torch.from_numpy(labels).long()}
    save_file(tensors, folder / "digits.safetensors")
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        for inputs, targets in DataLoader(images(folder, KNOWN, test=False), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    save_file(model.state_dict(), folder / "base.safetensors")
    print(f"{folder}/base.safetensors: {accuracy(model, images(folder, KNOWN, test=True)):.1%} of the digits 0 to 4 are right")


def merge(folder: Path, run: Path) -> None:
    """Merges the adapters that a run has trained into the base, and reports what they changed."""
    base, model, test = load_base(folder), with_adapters(load_base(folder), RANK), images(folder, NEW, test=True)
    frozen = sum(parameter.numel() for parameter in base.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    model.load_state_dict(load_file(run / "model.safetensors"), strict=False)  # the base is not in the file
    with_them, whole = accuracy(model, test), merged(model)
    save_file(whole.state_dict(), folder / "merged.safetensors")
    print(f"parameters    {frozen:,} in the base, {trained:,} in the adapters: P is {frozen / trained:.0f} times smaller")
    print(f"a commit      {8 * trained / 1e6:.2f} MB both ways together, instead of {8 * frozen / 1e6:.2f} MB")
    print(f"digits 5 to 9 {accuracy(base, test):.1%} right before, {with_them:.1%} with the adapters")
    print(f"merged        {accuracy(whole, test):.1%} right, in {folder}/merged.safetensors")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pretrain", folder]:
            pretrain(Path(folder))
        case ["merge", folder, run]:
            merge(Path(folder), Path(run))
        case _:
            sys.exit(__doc__)
