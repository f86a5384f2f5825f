"""This server, on each transport and in each wire format: `gem-server` and a session for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gem_client import connect
from gem_worker.launcher.cluster import free_port

from benchmarks.lib.load import LoadFailed, RoundTrip
from benchmarks.lib.processes import server
from benchmarks.peers.contenders.base import HOST, Contender, Place, gradient
from benchmarks.peers.contenders.encryption import certificate, make_certificate


@dataclass(frozen=True)
class Ours(Contender):
    """Sessions in shared memory, over the lane's TCP port in some wire format, plain or TLS, or over gRPC."""

    gradient_dtype: str = "float32"
    theta_dtype: str = "float32"
    kind: ClassVar[str] = "ours"

    @contextmanager
    def server(self, place: Place) -> Iterator[list[int]]:
        lane = "off" if self.transport == "grpc" else f"{HOST}:{free_port()}"
        options = []
        pem = make_certificate(place) if self.transport == "tls" else None
        if pem is not None:
            options += [f"--tls-cert={pem}", f"--tls-key={pem}"]
        with server(self.rule, place.port, *options, tls_ca=pem, lane_listen=lane) as (_, pid):
            yield [pid]

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        shared = self.transport == "shm"
        options: dict[str, Any] = {"gradient_dtype": self.gradient_dtype, "theta_dtype": self.theta_dtype}
        if self.transport == "tls":
            options["tls_ca"] = certificate(place)
        with connect(place.address, name=f"worker-{index}", shared_memory=shared, **options) as session:
            session.join({"theta": np.zeros(place.parameters, np.float32)})
            if session.transport != {"shm": "memory"}.get(self.transport, self.transport):
                raise LoadFailed(f"the session fell back to another transport: {session.transport}")
            mine = session.gradient
            np.copyto(mine, gradient(place, index))
            yield lambda: session.commit(mine).theta


OURS = (
    Ours("ours-shm", "this server, shared memory", "gem", "shm"),
    Ours("ours-tcp", "this server, TCP float32", "gem", "tcp"),
    Ours("ours-tls", "this server, TLS float32", "gem", "tls"),
    Ours("ours-tls-bf16", "this server, TLS bfloat16 both ways", "gem", "tls", "bfloat16", "bfloat16"),
    Ours("ours-grpc", "this server, gRPC float32", "gem", "grpc"),
    Ours("ours-tcp-bf16", "this server, TCP bfloat16 both ways", gradient_dtype="bfloat16", theta_dtype="bfloat16"),
    Ours("ours-tcp-int8", "this server, TCP int8 up, bfloat16 down", gradient_dtype="int8", theta_dtype="bfloat16"),
)
