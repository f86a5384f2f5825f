"""The devices that models and batches are on: which ones a process uses, and how a batch gets there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gem_api.errors import InvalidRequest

CPU = torch.device("cpu")


def devices(choice: str, workers: Iterable[int] = (0,)) -> list[torch.device]:
    """The device of each worker, given the workers' numbers and the value of `--device`.

    "auto" deals the machine's GPUs to the workers in turn, by their number; without a GPU it is the CPU. "cuda" is the first
    one. Where torchrun or Slurm has numbered the processes of a machine, these begin at the process's number.

    Raises:
        InvalidRequest: The machine has no such device. The message lists those that it has.
    """
    accelerator = torch.accelerator.current_accelerator()
    gpus = [torch.device(accelerator.type, number) for number in range(torch.accelerator.device_count())] if accelerator else []
    first = _number_on_machine()
    if choice == "auto":
        return [gpus[(first + number) % len(gpus)] if gpus else CPU for number in workers]
    here = [CPU, *gpus]
    named = {str(device): device for device in here} | ({gpus[0].type: gpus[first % len(gpus)]} if gpus else {})
    if choice not in named:
        raise InvalidRequest(f"--device {choice}: this machine has {_words(here)}{_without_cuda()}; give one of these, or auto")
    return [named[choice] for _ in workers]


def on_cpu(choice: str) -> bool:
    """Whether workers with this `--device` compute on the CPU."""
    return choice == "cpu" or (choice == "auto" and devices(choice) == [CPU])


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device: a tensor; a tuple, list or mapping, nested at will; or an object with a
    method `to(device)`. Anything else stays as it is. A page-locked tensor's copy is only queued."""
    if device == CPU:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=pins(device))
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
    if pins(device):
        torch.get_device_module(device).set_device(device)


def pins(device: torch.device) -> bool:
    """Whether batches for the device are put into page-locked memory, from which it copies by itself."""
    return device.type in ("cuda", "xpu")


def _number_on_machine() -> int:
    """The process's number on this machine, if torchrun or Slurm started it; 0 for any other."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def _words(names: Iterable[object]) -> str:
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def _without_cuda() -> str:
    return "" if torch.version.cuda or torch.version.hip else f" (PyTorch {torch.__version__} is built without CUDA)"
