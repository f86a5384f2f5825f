"""How many threads PyTorch's operations get."""

from __future__ import annotations


def one_thread() -> None:
    """As torchrun has it: the processes share the cores."""
    import torch

    torch.set_num_threads(1)
