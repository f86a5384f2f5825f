"""This server, on each transport and in each wire format: `gem-server` and a session for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gem_client import connect
from gem_worker.launcher.cluster import free_port

from benchmarks.peers.contenders.base import HOST, Contender, ContenderFailedError, Place, RoundTrip, gradient
from benchmarks.processes import server


@dataclass(frozen=True)
class Ours(Contender):
    """Sessions in shared memory, over the lane's TCP port in some wire format, or over gRPC."""

    name: str
    label: str
    transport: str
    gradient_dtype: str = "float32"
    theta_dtype: str = "float32"
    floor: str | None = None
    rule: str = "gem"
    kind: ClassVar[str] = "ours"
    # The server's m, s and upload; the worker's gradient and θ; what is under way inside gRPC.
    buffers: ClassVar[int] = 9

    @contextmanager
    def server(self, place: Place) -> Iterator[list[int]]:
        lane = "off" if self.transport == "grpc" else f"{HOST}:{free_port()}"
        with server(self.rule, place.port, f"--lane-listen={lane}") as (_, pid):
            yield [pid]

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        shared = self.transport == "shm"
        formats: dict[str, Any] = {"gradient_dtype": self.gradient_dtype, "theta_dtype": self.theta_dtype}
        with connect(place.address, name=f"worker-{index}", shared_memory=shared, **formats) as session:
            session.join({"theta": np.zeros(place.parameters, np.float32)})
            if session.transport != {"shm": "memory"}.get(self.transport, self.transport):
                raise ContenderFailedError(f"the session fell back to another transport: {session.transport}")
            mine = session.gradient
            np.copyto(mine, gradient(place, index))
            yield lambda: session.commit(mine).theta


OURS = (
    Ours("ours-shm", "this server, shared memory", "shm", floor="fused-pass"),
    Ours("ours-tcp", "this server, TCP float32", "tcp", floor="tcp-echo"),
    Ours("ours-grpc", "this server, gRPC float32", "grpc", floor="grpc-echo"),
    Ours("ours-tcp-bf16", "this server, TCP bfloat16 both ways", "tcp", "bfloat16", "bfloat16"),
    Ours("ours-tcp-fp16", "this server, TCP float16 up, float32 down", "tcp", "float16"),
    Ours("ours-tcp-int8", "this server, TCP int8 up, bfloat16 down", "tcp", "int8", "bfloat16"),
)
