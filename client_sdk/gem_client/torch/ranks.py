"""What the ranks of a DistributedDataParallel model tell each other, so that they are one worker together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from contextvars import copy_context
from itertools import cycle, groupby, islice
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from gem_api.errors import InvalidRequest, TransportError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gem_client.transport.side_thread import SideThread

BEAT_SECONDS = 30.0  # how often rank 0 says that it still waits for the server; far below the limit of PyTorch's groups
BUCKET_ELEMENTS = 1 << 24  # that one collective call carries, so that packing takes 64 MiB at most


class Ranks:
    """The ranks of a DistributedDataParallel model. All of them call these methods, in the same order.

    Messages are JSON, in a gloo group of their own: they need no GPU, and a process that ends closes its connections, so that
    the others know at once.

    Args:
        model: The model that DistributedDataParallel wraps. It averages the gradients, in `backward`.

    Attributes:
        number: That of this rank, from 0.
        count: How many ranks there are.
    """

    def __init__(self, model: Any) -> None:
        self._model = require_averaged(model)
        self._group = self._model.process_group
        members = dist.get_process_group_ranks(self._group)
        self.number, self.count = dist.get_rank(self._group), len(members)
        with lost_ranks():
            some = self.count < dist.get_world_size()  # the others make no group
            self._messages = dist.new_group(members, backend="gloo", use_local_synchronization=some)
        self._thread = SideThread("gem-ranks", RLock())

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.number == 0

    @property
    def names(self) -> list[tuple[str, nn.Parameter]]:
        """The model's parameters and their names, without those that DistributedDataParallel was told to ignore."""
        ignored = set(self._model.parameters_to_ignore)
        return [(name, each) for name, each in self._model.module.named_parameters() if name not in ignored]

    def first(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Has rank 0 call `work`, which may take as long as it likes and raises nothing. Returns its message on all ranks."""
        with lost_ranks():
            if not self.leads:
                while (message := self._receive()) is None:
                    pass
                return message
            future = self._thread.submit(copy_context().run, work)
            while not wait([future], BEAT_SECONDS).done:
                self._send(None)
        message = future.result()
        with lost_ranks():
            self._send(message)
        return message

    def mean(self, value: float | None) -> float | None:
        """The mean of the ranks' values; None if no rank has one."""
        total = torch.tensor([0.0 if value is None else float(value), value is not None], dtype=torch.float64, device="cpu")
        with lost_ranks():
            dist.all_reduce(total, group=self._messages)
        return float(total[0] / total[1]) if total[1] else None

    def average(self, parameters: Sequence[Tensor], new: bool) -> bool:
        """Averages the parameters' gradients if they are new on any rank, and returns whether they are. `backward` has not done
        so under `no_sync`; what it has averaged stays as it is."""
        new, *has_gradient = self._any([new, *(parameter.grad is not None for parameter in parameters)])
        if not new:
            return False
        for parameter, has in zip(parameters, has_gradient, strict=True):
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

        def mean(packed: Tensor) -> None:
            dist.all_reduce(packed, group=self._group)
            packed /= self.count

        self._exchange([parameter.grad for parameter in parameters if parameter.grad is not None], mean)
        return True

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Gives the parameters of all ranks the values of rank 0's."""
        self._exchange(parameters, lambda packed: dist.broadcast(packed, group=self._group, group_src=0))

    def _any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        union = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        with lost_ranks():
            dist.all_reduce(union, dist.ReduceOp.MAX, group=self._messages)
        return [bool(flag) for flag in union]

    def _exchange(self, tensors: Sequence[Tensor], exchange: Callable[[Tensor], Any]) -> None:
        with torch.no_grad(), lost_ranks():
            for bucket in _buckets(tensors):
                packed = torch.cat([tensor.reshape(-1) for tensor in bucket])
                exchange(packed)
                parts = packed.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _send(self, message: dict[str, Any] | None) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)], device="cpu"), group=self._messages, group_src=0)
        dist.broadcast(data, group=self._messages, group_src=0)

    def _receive(self) -> dict[str, Any] | None:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.broadcast(size, group=self._messages, group_src=0)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(data, group=self._messages, group_src=0)
        message: dict[str, Any] | None = json.loads(data.numpy().tobytes())
        return message


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raises `lost_rank` of an error of PyTorch's."""
    try:
        yield
    except RuntimeError as error:
        if (lost := lost_rank(error)) is None:
            raise
        raise lost from error


def lost_rank(error: BaseException | None) -> TransportError | None:
    """The error for users if PyTorch's own says that a rank can't be reached: it has ended, or was silent for too long."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)  # without a class of its own
    if not isinstance(error, dist.DistError) and not of_gloo:
        return None
    first_line = str(error).strip().partition("\n")[0]
    return TransportError(
        "another rank of this worker has ended, or its loop makes other calls than this one's, so the worker ends: the server "
        f"deals its batches again. Look for that rank's error, and start all ranks again ({first_line})"
    )


def require_averaged(model: Any) -> DistributedDataParallel:
    """The model, without what `torch.compile` wraps around it. Raises InvalidRequest unless it is a
    DistributedDataParallel."""
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, DistributedDataParallel):
        return plain
    kind = type(plain).__name__
    if kind.startswith("FSDP") or kind == "FullyShardedDataParallel":
        raise InvalidRequest(
            f"the model is a {kind}: each rank holds a part of the parameters, and a commit needs whole ones. Use "
            "DistributedDataParallel, and if memory is short bf16 and activation checkpointing; an AdamW on the server takes "
            "none here"
        )
    raise InvalidRequest(
        f"give the model as DistributedDataParallel wraps it, not a {kind}: it averages the gradients of the ranks. model = "
        'DistributedDataParallel(model), then connect_ranks("host:port", model)'
    )


def part_of(batch: Sequence[int], number: int, count: int, whole: int) -> list[int]:
    """The samples of a batch for one rank of `count`. All ranks get equally many, because DistributedDataParallel averages
    their gradients without weights; if the batch can't be divided, samples come twice. At least two, because BatchNorm fails on
    a single one, unless that is a rank's part of a `whole` batch."""
    size = max(-(-len(batch) // count), min(2, -(-whole // count)))
    return list(islice(cycle(batch), number * size, (number + 1) * size))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in groups of one dtype and device, each of limited size."""

    def kind(tensor: Tensor) -> tuple[str, str]:
        return str(tensor.dtype), str(tensor.device)

    for _, alike in groupby(sorted(tensors, key=kind), kind):
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET_ELEMENTS:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
