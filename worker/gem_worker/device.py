"""The devices that models and batches are on: which ones a process uses, and how a batch gets there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gem_api.errors import InvalidRequest

CPU = torch.device("cpu")


def devices(choice: str, workers: Iterable[int] = (0,)) -> list[torch.device]:
    """The device of each worker, given the workers' numbers and the value of `--device`.

    "auto" deals the machine's CUDA devices to the workers in turn, by their number; without CUDA it is the CPU.

    Raises:
        InvalidRequest: The machine has no such device. The message lists those that it has.
    """
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if choice == "auto":
        return [gpus[number % len(gpus)] if gpus else CPU for number in workers]
    here = [CPU, *gpus, *([torch.device("mps")] if torch.backends.mps.is_available() else [])]
    named = {str(device): device for device in here} | ({"cuda": gpus[0]} if gpus else {})
    if choice not in named:
        raise InvalidRequest(f"--device {choice}: this machine has {_words(here)}{_without_cuda()}; give one of these, or auto")
    return [named[choice] for _ in workers]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device: a tensor; a tuple, list or mapping, nested at will; or an object with a
    method `to(device)`. Anything else stays as it is. A page-locked tensor's copy to a CUDA device is only queued."""
    if device == CPU:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def use(device: torch.device) -> None:
    """Makes the device the calling thread's own, so that page-locked memory and plain "cuda" belong to it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _words(names: Iterable[object]) -> str:
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def _without_cuda() -> str:
    return "" if torch.version.cuda or torch.version.hip else f" (PyTorch {torch.__version__} is built without CUDA)"
