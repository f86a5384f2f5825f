"""The floors of a step: bare copies between GPU and host, and an all-reduce by gloo."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from gem_api.region import create_region
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.checks import Checks, Found
from benchmarks.gpu.model import Size
from benchmarks.gpu.timing import milliseconds

_RANKS, _RANKS_QUICK = 4, 2
_REDUCTIONS = 4


def copies(size: Size, checks: Checks) -> Found:
    """Milliseconds of copies of a model's 4P bytes."""
    count = size.parameters()
    values, region = torch.rand(count, device=checks.device), _region(count)
    times: dict[str, float] = {}
    hosts = {"pageable": torch.zeros(count), "region": region, "page-locked": torch.zeros(count, pin_memory=checks.on_gpu)}
    for name, host in hosts.items():
        times |= _both_ways(name, values, host)
    if checks.on_gpu:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0)))
        times |= _both_ways("registered region", values, region)
        torch.cuda.cudart().cudaHostUnregister(region.data_ptr())
    times["host to host, one thread"] = milliseconds(partial(np.copyto, region.numpy(), host.numpy()), 3)
    times[f"host to host, {torch.get_num_threads()} threads"] = milliseconds(partial(region.copy_, host), 3)
    return {"parameters": count, "ms": times | _in_parts(size.shapes(), values, host)}


def _region(count: int) -> Tensor:
    """Memory as a server shares it with a worker."""
    region, descriptor = create_region(count)
    os.close(descriptor)
    return torch.from_numpy(region.gradient)


def _both_ways(name: str, values: Tensor, host: Tensor) -> dict[str, float]:
    return {
        f"to host, {name}": milliseconds(partial(host.copy_, values, non_blocking=True)),
        f"to device, {name}": milliseconds(partial(values.copy_, host, non_blocking=True)),
    }


def _in_parts(shapes: list[torch.Size], values: Tensor, host: Tensor) -> dict[str, float]:
    """Tensor by tensor, and gathered before."""
    counts = [shape.numel() for shape in shapes]
    ours, gathered, theirs = values.split(counts), torch.empty_like(values).split(counts), host.split(counts)

    def each_alone() -> None:
        for to, of in zip(theirs, ours, strict=True):
            to.copy_(of, non_blocking=True)

    return {
        f"to host, {len(counts)} tensors": milliseconds(each_alone),
        "gathered on the device": milliseconds(partial(torch._foreach_copy_, gathered, ours)),
    }


def gloo(size: Size, checks: Checks) -> Found:
    """The median time of an all-reduce of P float32 between processes of this machine."""
    ranks = _RANKS_QUICK if checks.quick else _RANKS
    with tempfile.TemporaryDirectory(prefix="gem-gloo-") as folder:
        spawn(_rank, (ranks, Path(folder), size.parameters()), nprocs=ranks)
        return {"processes": ranks, "ms": float((Path(folder) / "ms").read_text())}


def _rank(rank: int, ranks: int, folder: Path, count: int) -> None:
    """The body of a process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks)
    values, times = torch.ones(count), []
    for _ in range(_REDUCTIONS):
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(values)
        times.append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        (folder / "ms").write_text(str(median(times[1:])))
    distributed.destroy_process_group()
