"""PyTorch's two ways: RPC (TensorPipe), where workers call a method of a parameter server in the process of rank 0; and the
authors' exchange, point-to-point messages of torch.distributed (gloo) with the rescaling on the worker.

A round trip of the latter is a pull, π on the worker, and a commit of the rescaled update, which the server adds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.lib.load import RoundTrip
from benchmarks.peers.contenders.base import HOST, START_SECONDS, OwnProcess, Place, gradient, one_thread
from benchmarks.peers.contenders.equations import ETA, rescaled

_PULL, _COMMIT = 0, 1  # the requests: the value of a worker's one-element message


class Gloo(OwnProcess):
    """Rank 0 serves requests in the order in which they arrive, from any worker."""

    def serve(self, place: Place, ready: Event) -> None:
        import torch
        from torch import distributed

        one_thread()
        ready.set()
        _join(place, 0)
        theta, update = torch.zeros(place.parameters), torch.zeros(place.parameters)
        request = torch.zeros(1, dtype=torch.int64)
        while True:
            worker = distributed.recv(request)
            if request.item() == _PULL:
                distributed.send(theta, worker)
            else:
                distributed.recv(update, worker)
                theta += update

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        import torch
        from torch import distributed

        one_thread()
        _join(place, index + 1)
        outgoing = torch.from_numpy(gradient(place, index))
        theta, moment, snapshot = (torch.zeros(place.parameters) for _ in range(3))
        pull, commit = torch.tensor([_PULL]), torch.tensor([_COMMIT])

        def update() -> Any:
            if self.rule == "add":
                return outgoing * -ETA
            rescaled_update = rescaled(torch, theta, outgoing, moment, snapshot)
            snapshot.copy_(theta)
            return rescaled_update

        def round_trip() -> Any:
            distributed.send(pull, 0)
            distributed.recv(theta, 0)
            send = update()
            distributed.send(commit, 0)
            distributed.send(send, 0)
            return theta

        yield round_trip


def _join(place: Place, rank: int) -> None:
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{HOST}:{place.port}",
        rank=rank,
        world_size=place.workers + 1,
        timeout=timedelta(seconds=START_SECONDS),
    )


GLOO = (Gloo("gloo-gem", "authors' exchange on gloo, GEM"), Gloo("gloo-add", "authors' exchange on gloo, plain add", "add"))


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
