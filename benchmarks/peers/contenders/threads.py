"""How many threads PyTorch's operations get in the peers: as their documentation has it, or what was fastest."""

from __future__ import annotations

import os

from benchmarks.peers.contenders.base import Place

TUNED = "GEM_BENCH_TUNED_PEERS"  # set by --tuned-peers, for the processes that are started
_MANY = 10_000_000  # parameters: at 156,450 a thread for each core halves PyTorch RPC's rate, at 25 million it helps


def one_thread() -> None:
    """As torchrun has it: the processes share the cores."""
    _limit(1)


def tune_rpc_server(place: Place) -> None:
    """All cores for large models, one thread for small ones; PyTorch's default is all cores always."""
    if TUNED in os.environ:
        _limit(1 if place.parameters < _MANY else len(os.sched_getaffinity(0)))


def tune_rpc_worker() -> None:
    """One thread, where PyTorch's default is one for each core."""
    if TUNED in os.environ:
        one_thread()


def _limit(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
