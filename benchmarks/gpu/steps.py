"""Section d: what a step takes, by part and in memory, for each way to the server; beside copies, gloo and a plain loop."""

from __future__ import annotations

import time
from typing import Any

import gem_client
import torch
from gem_client.torch import Optimizer
from gem_worker.launcher.cluster import free_port

from benchmarks.gpu.checks import Checks, Found
from benchmarks.gpu.copies import copies, gloo
from benchmarks.gpu.model import Trainee, sizes
from benchmarks.gpu.timing import Parts, memory, milliseconds, passes, synchronise
from benchmarks.lib.processes import server

_TCP: dict[str, Any] = {"shared_memory": False}
_HALF: dict[str, Any] = {**_TCP, "gradient_dtype": "bfloat16", "theta_dtype": "bfloat16"}
_WAYS = {  # arguments of `gem_client.connect`, and whether the next gradient is computed meanwhile
    "memory": ({}, False), "memory, overlap": ({}, True), "TCP": (_TCP, False), "TCP, bfloat16": (_HALF, False),
    "TCP, int8": ({**_HALF, "gradient_dtype": "int8"}, False), "TCP, bfloat16, overlap": (_HALF, True),
}  # fmt: skip
_FIRST = 4  # steps before the measurement: the first ones compare all values


def run(checks: Checks) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    for name, size in sizes(checks).items():
        checks.check(f"d.copies {name}", copies, size, checks)
    for name, size in sizes(checks).items():
        trainee, metrics = Trainee(size, checks.device), f"127.0.0.1:{free_port()}"
        checks.check(f"d.plain loop {name}", _plain, trainee)
        with server("gem", None, "--until-stopped", f"--metrics-listen={metrics}") as (address, pid):
            for way, (connect, overlap) in _WAYS.items():
                arguments = (trainee, size.steps, address, pid, metrics, connect, overlap)
                checks.check(f"d.step {name}, {way}", _step, *arguments)
    for name, size in sizes(checks).items():
        checks.check(f"d.gloo {name}", gloo, size, checks)


def _plain(trainee: Trainee) -> Found:
    """Without a server, and what computing alone takes."""
    compute = milliseconds(trainee.backward, 5, 3)
    optimizer = torch.optim.AdamW(trainee.model.parameters(), fused=torch.cuda.is_available())

    def iteration() -> None:
        trainee.backward()
        optimizer.step()

    return {"compute_ms": compute, "iteration_ms": milliseconds(iteration, 5, 2), "gpu_bytes": torch.cuda.memory_allocated()}


def _step(
    trainee: Trainee, steps: int, address: str, pid: int, metrics: str, connect: dict[str, Any], overlap: bool
) -> Found:  # fmt: skip
    """The mean time of an iteration as a loop has it, and of the parts of `step()` if the GPU is idle when it begins."""
    held, before = torch.cuda.memory_allocated(), memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with gem_client.connect(address, **connect) as session:
        inner = torch.optim.AdamW(trainee.model.named_parameters())
        optimizer = Optimizer(inner, session, on="server", overlap=overlap)
        _iterations(trainee, optimizer, _FIRST)
        iteration = _iterations(trainee, optimizer, steps)
        parts, (commits, spent) = Parts(session), passes(metrics)
        for _ in range(steps):
            loss = trainee.backward()
            synchronise()
            parts.begin()
            optimizer.step(loss=loss)
            parts.lap("after")
            synchronise()
            parts.lap("still on the device")
        ms = {part: value / steps for part, value in parts.ms.items()}
        optimizer.finish()
        all_commits, all_spent = passes(metrics)
        ms["of these, the server's pass"] = (all_spent - spent) / (all_commits - commits)
        used = {"host": memory(), "host_before": before, "server": memory(pid), **_on_gpu(held)}
        return {"transport": session.transport, "iteration_ms": iteration, "ms": ms, "bytes": used}


def _iterations(trainee: Trainee, optimizer: Optimizer, steps: int) -> float:
    """The mean milliseconds of an iteration."""
    synchronise()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.step(loss=trainee.backward())
    synchronise()
    return 1e3 * (time.perf_counter() - began) / steps


def _on_gpu(before: int) -> dict[str, Any]:
    """By how much the GPU's memory has grown, at most, and the page-locked memory of PyTorch's allocator."""
    if not torch.cuda.is_available():
        return {}
    locked = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return {"gpu_more": torch.cuda.max_memory_allocated() - before, "page_locked": locked}
