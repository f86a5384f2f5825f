"""How many threads PyTorch's operations get in the peers: what was fastest for each of them."""

from __future__ import annotations

import os

from benchmarks.contenders.base import Place

_MANY = 10_000_000  # parameters: at 156,450 a thread for each core halved PyTorch RPC's rate, at 25 million it helped


def one_thread() -> None:
    """As torchrun has it: the processes share the cores."""
    _limit(1)


def limit_rpc_server(place: Place) -> None:
    """All cores for large models, one thread for small ones."""
    _limit(1 if place.parameters < _MANY else len(os.sched_getaffinity(0)))


def _limit(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
