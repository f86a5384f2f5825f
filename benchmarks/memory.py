"""Measures the memory that a worker takes in its own process and on the server: `python -m benchmarks.memory`.

Prints a row for each kind of loop, in arrays of P float32: by how much the worker's resident memory grows beside the model and
its gradients, and the server's for this worker. Tensors go over the network. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

WIDTH = 3_200  # P = WIDTH², 41 MB an array
ARRAY = 4 * WIDTH**2
# By name: the server's flags, and what the worker brings; no flags: no server.
LOOPS: dict[str, tuple[list[str] | None, str]] = {
    "AdamW without a server": (None, "alone"),
    "SGD, paper's GEM": ([], "parameters"),
    "SGD, paper's GEM, 4 local steps": (["--local-steps", "4"], "parameters"),
    "AdamW on the server": ([], "server"),
    "AdamW on the worker": ([], "worker"),
    "AdamW on the worker, 4 local steps": (["--local-steps", "4"], "worker"),
}


def resident(pid: int | str) -> int:
    """Bytes of a process's resident memory."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def worker(brings: str, address: str) -> None:
    """Trains for some steps, prints by how many arrays this process has grown, and stays until its input ends."""
    import torch
    from gem_client import connect
    from gem_client.torch import Optimizer

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # what PyTorch loads for any optimizer does not depend on P
    session = None if brings == "alone" else connect(address, shared_memory=False)
    before = resident("self")
    optimizer: Any = torch.optim.AdamW([parameter]) if brings != "parameters" else [parameter]
    if session is not None:
        optimizer = Optimizer(optimizer, session, on="server" if brings == "server" else "worker")
    for _ in range(9):
        optimizer.step()
    print((resident("self") - before) / ARRAY, flush=True)
    sys.stdin.read()
    if session is not None:
        session.close()


def measure(flags: list[str] | None, brings: str, port: int) -> tuple[float, float]:
    """Arrays in a worker's process, and on the server for the second of two workers."""
    address = f"127.0.0.1:{port}"
    command = [
        str(Path(sys.executable).with_name("gem-server")),
        "--until-stopped",
        "--listen",
        address,
        "--metrics-listen",
        "",
    ]
    server = None if flags is None else subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    workers: list[subprocess.Popen[str]] = []
    grown, on_server = [0.0], [0]
    try:
        for _ in range(1 if server is None else 2):
            line = [sys.executable, "-m", "benchmarks.memory", "--worker", brings, "--address", address]
            workers.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert workers[-1].stdout is not None
            grown.append(float(workers[-1].stdout.readline()))
            on_server.append(0 if server is None else resident(server.pid))
    finally:
        for process in workers:
            process.communicate()
        if server is not None:
            server.terminate()
            server.wait()
    return grown[1], (on_server[-1] - on_server[-2]) / ARRAY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=50061, help="where the servers listen")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.address)
        return
    print(f"| P = {WIDTH**2:,} | worker, beside model and gradients | server, for each worker |\n|---|---|---|")
    for name, (flags, brings) in LOOPS.items():
        own, servers = measure(flags, brings, options.port)
        print(f"| {name} | {own:.1f} | {'–' if flags is None else f'{servers:.1f}'} |", flush=True)


if __name__ == "__main__":
    main()
