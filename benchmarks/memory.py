"""Measures the memory that a worker takes in its own process and on the server: `python -m benchmarks.memory`.

Prints a row for each kind of loop, in arrays of P float32: by how much the worker's resident memory grows beside the model and
its gradients, and the server's for this worker. Then the memory of a server of 25 million parameters with 1, 16 and 100 workers
beside what `gem-ctl plan` says, if the machine has that much. Tensors go over the network. Linux only.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from gem_client import connect
from gem_client.run import membership
from gem_client.torch import Optimizer
from gem_ctl.planning.plan import Setup, plan

from benchmarks.lib import machine
from benchmarks.lib.load import resident_bytes
from benchmarks.lib.processes import server

WIDTH = 3_200  # P = WIDTH², 41 MB an array
ARRAY = 4 * WIDTH**2
CROWDED, CROWDS = 25_000_000, (1, 16, 100)  # P and numbers of workers of the second table
# By name: the server's flags, and what the worker brings; no flags: no server.
LOOPS: dict[str, tuple[list[str] | None, str]] = {
    "AdamW without a server": (None, "alone"),
    "SGD, paper's GEM": ([], "parameters"),
    "SGD, paper's GEM, 4 local steps": (["--local-steps", "4"], "parameters"),
    "AdamW on the server": ([], "server"),
    "AdamW on the worker": ([], "worker"),
    "AdamW on the worker, 4 local steps": (["--local-steps", "4"], "worker"),
}


def worker(brings: str, address: str, told: Connection) -> None:
    """Trains for some steps, tells by how many arrays this process has grown, and stays until it is told to end."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # what PyTorch loads for any optimizer does not depend on P
    session = None if brings == "alone" else connect(address, shared_memory=False)
    before = resident_bytes(os.getpid())
    optimizer: Any = torch.optim.AdamW([parameter]) if brings != "parameters" else [parameter]
    if session is not None:
        optimizer = Optimizer(optimizer, session, on="server" if brings == "server" else "worker")
    for _ in range(9):
        optimizer.step()
    told.send((resident_bytes(os.getpid()) - before) / ARRAY)
    told.recv()
    if session is not None:
        session.close()


def measure(flags: list[str] | None, brings: str) -> tuple[float, float]:
    """Arrays in a worker's process, and on the server for the second of two workers."""
    grown, on_server = [0.0], [0]
    with ExitStack() as stack:
        address, pid = ("", 0) if flags is None else stack.enter_context(server("gem", None, "--until-stopped", *flags))
        for _ in range(1 if flags is None else 2):
            ours, theirs = mp.Pipe()
            process = mp.get_context("spawn").Process(target=worker, args=(brings, address, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, "end")
            grown.append(ours.recv())
            on_server.append(resident_bytes(pid) if pid else 0)
    return grown[1], (on_server[-1] - on_server[-2]) / ARRAY


def crowd(address: str, workers: int, done: Any) -> None:
    """Workers that all commit twice, at the same time, then wait until this process is killed. They share the memory that a
    worker has: what they send does not matter here."""
    theta, gradient = np.zeros(CROWDED, np.float32), np.zeros(CROWDED, np.float32)
    membership.empty = lambda size: theta  # type: ignore[attr-defined]
    together, committed = threading.Barrier(workers), threading.Barrier(workers + 1)

    def work() -> None:
        session = connect(address, shared_memory=False)
        session.join({"w": gradient})
        together.wait()
        for _ in range(2):
            session.commit(gradient)
        committed.wait()
        session.finish_commit()

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    committed.wait()
    done.set()
    threading.Event().wait()


def measure_server(optimizer: str, workers: int) -> int:
    """Bytes of a server whose workers have all committed."""
    context = mp.get_context("spawn")
    done = context.Event()
    with server("gem", None, "--optimizer", optimizer, "--until-stopped") as (address, pid):
        crowded = context.Process(target=crowd, args=(address, workers, done), daemon=True)
        crowded.start()
        while not done.wait(1.0):
            assert crowded.is_alive(), "the workers have ended: see above"
        measured = resident_bytes(pid)
        crowded.kill()
    return measured


def row(optimizer: str, workers: int) -> str:
    planned = plan(Setup(CROWDED, workers, compute_seconds=1.0, optimizer=optimizer)).server_bytes
    if planned + 10 * CROWDED * 4 > machine.available_bytes():
        return f"| {optimizer} | {workers} | this machine has too little | {planned / 1e6:,.0f} | |"
    measured = measure_server(optimizer, workers)
    return f"| {optimizer} | {workers} | {measured / 1e6:,.0f} | {planned / 1e6:,.0f} | {measured / planned:.2f} |"


def main() -> None:
    print(f"| P = {WIDTH**2:,} | worker, beside model and gradients | server, for each worker |\n|---|---|---|")
    for name, (flags, brings) in LOOPS.items():
        own, servers = measure(flags, brings)
        print(f"| {name} | {own:.1f} | {'–' if flags is None else f'{servers:.1f}'} |", flush=True)
    print(f"\n| P = {CROWDED:,} | workers | server, MB | gem-ctl plan, MB | ratio |\n|---|---|---|---|---|")
    for optimizer in ("sgd", "adamw"):
        for workers in CROWDS:
            print(row(optimizer, workers), flush=True)


if __name__ == "__main__":
    main()
