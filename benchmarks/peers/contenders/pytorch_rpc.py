"""PyTorch RPC (TensorPipe): workers call a method of a parameter server that lives in the process of rank 0."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.peers.contenders.base import HOST, START_SECONDS, OwnProcess, Place, RoundTrip, gradient, one_thread
from benchmarks.peers.contenders.equations import ETA, rescaled

_SERVER = "server"


class ParameterServer:
    """θ and each worker's m and s; one commit at a time. All tensors are float32, shape (P,)."""

    def __init__(self, place: Place) -> None:
        import torch

        self._lock = threading.Lock()
        self._theta = torch.zeros(place.parameters)
        self._moments = [torch.zeros(place.parameters) for _ in range(place.workers)]
        self._snapshots = [torch.zeros(place.parameters) for _ in range(place.workers)]

    def gem(self, worker: int, gradient: Any) -> Any:
        """Applies the worker's gradient by GEM and returns θ: its snapshot, which only its own next commit changes."""
        import torch

        snapshot = self._snapshots[worker]
        with self._lock:
            self._theta += rescaled(torch, self._theta, gradient, self._moments[worker], snapshot)
            return snapshot.copy_(self._theta)

    def add(self, worker: int, gradient: Any) -> Any:
        """θ ← θ − η·g; returns a copy of θ, so that it is of one version."""
        with self._lock:
            return self._theta.add_(gradient, alpha=-ETA).clone()


@dataclass(frozen=True)
class PytorchRpc(OwnProcess):
    """`rpc_sync` on a remote reference, over the transports that PyTorch chooses on one host, or over TCP alone."""

    alone: bool = False  # one thread a process; else PyTorch's default, one for each core

    def serve(self, place: Place, ready: Event) -> None:
        from torch.distributed import rpc

        self._limit_threads()
        ready.set()
        rpc.init_rpc(_SERVER, rank=0, world_size=place.workers + 1, rpc_backend_options=self._options(place))
        threading.Event().wait()

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        import torch
        from torch.distributed import rpc

        self._limit_threads()
        options = self._options(place)
        rpc.init_rpc(f"worker-{index}", rank=index + 1, world_size=place.workers + 1, rpc_backend_options=options)
        server = rpc.remote(_SERVER, shared_server, args=(place,))
        outgoing = torch.from_numpy(gradient(place, index))
        commit = server.rpc_sync()

        def round_trip() -> Any:
            return getattr(commit, self.rule)(index, outgoing)

        yield round_trip

    @property
    def of(self) -> str:
        return f"rpc-{self.transport}-{self.rule}"

    def _limit_threads(self) -> None:
        if self.alone:
            one_thread()

    def _options(self, place: Place) -> Any:
        from torch.distributed import rpc

        only_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if self.transport == "tcp" else {}
        return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{HOST}:{place.port}", rpc_timeout=START_SECONDS, **only_tcp)


_made: list[ParameterServer] = []
_making = threading.Lock()


def shared_server(place: Place) -> ParameterServer:
    """The parameter server of this process. The first call makes it."""
    with _making:
        if not _made:
            _made.append(ParameterServer(place))
        return _made[0]


def _variants(rule: str, what: str) -> Iterator[PytorchRpc]:
    """Both transports, each with PyTorch's default number of threads, and with one."""
    for transport, over in (("shm", "shared memory"), ("tcp", "TCP")):
        label = f"PyTorch RPC, {over}, {what}"
        yield PytorchRpc(f"rpc-{transport}-{rule}", label, rule, transport)
        yield PytorchRpc(f"rpc-{transport}-{rule}-1", f"{label}, one thread", rule, transport, alone=True)


PYTORCH_RPC = (*_variants("gem", "GEM"), *_variants("add", "plain add"))
