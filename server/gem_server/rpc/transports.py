"""The two ways to transfer a commit's tensors: over the network, or through shared memory."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

import numpy as np
from gem_api.layout import Vector
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, ThetaFormat, gradient_format, theta_format

from gem_server.apply_loop import run_blocking
from gem_server.core.central_variable import require_finite
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.rpc.tensor_stream import Transfer

PIECE = 1 << 18  # elements that are copied and checked at a time, while they are in the cache; as many as a chunk holds


class Transport(Protocol):
    """How one commit's gradient arrives, and how its reply is sent."""

    async def fetch(self, lease: Lease, limit: np.float32, norm: GradientNorm | None) -> Arrived:
        """Returns once `lease.upload` holds the whole gradient. Adds it to `norm`, if given: the measured gradient is the one
        applied. Raises NonFiniteGradient, IncompleteTransfer."""

    async def skip(self, lease: Lease) -> None:
        """Reads and drops the gradient of a repeated commit."""

    async def deliver(self, result: bytes, theta: Vector) -> None:
        """Sends the commit's result and θ (float32, shape (P,))."""


class Network:
    """Transfers chunks in the call's stream, in the formats that the commit's header names. With `logged`, keeps compressed
    bytes for the log. Raises InvalidRequest for unknown formats."""

    def __init__(self, header: pb.CommitHeader, transfer: Transfer, logged: bool) -> None:
        self._transfer = transfer
        self._logged = logged
        self._gradient = gradient_format(header.wire_dtype)
        self._theta = stated_theta_format(header.theta_dtype)

    async def fetch(self, lease: Lease, limit: np.float32, norm: GradientNorm | None) -> Arrived:
        kept: list[memoryview] | None = [] if self._logged and self._gradient is not FLOAT32 else None
        await self._transfer.receive(lease.upload, limit, "gradient", self._gradient, norm, kept)
        return as_floats(lease.upload) if kept is None else Arrived(self._gradient.dtype, kept)

    async def skip(self, lease: Lease) -> None:
        await self._transfer.skip(self._gradient.nbytes(lease.upload.size))

    async def deliver(self, result: bytes, theta: Vector) -> None:
        await self._transfer.send(result, theta, self._theta)


class SharedMemory:
    """Uses a region of shared memory: the gradient is there before its header arrives, and the rule writes θ there for the
    worker to read."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    async def fetch(self, lease: Lease, limit: np.float32, norm: GradientNorm | None) -> Arrived:
        assert lease.region is not None
        if lease.upload is not lease.region.gradient:
            await self._copy(lease, lease.region.gradient, limit, norm)
        else:  # the worker may still change the gradient after this check; therefore the rule checks what it reads again
            await run_blocking(partial(require_finite, lease.upload, limit, "gradient"), lease.upload.size)
        return as_floats(lease.upload)

    async def _copy(self, lease: Lease, shared: Vector, limit: np.float32, norm: GradientNorm | None) -> None:
        """Copies the gradient to memory that the worker can't change. Runs on the event loop's thread: another thread could
        still write to the buffer after a newer call has replaced this one."""
        for begin in range(0, shared.size, PIECE):
            piece = lease.upload[begin : begin + PIECE]
            np.copyto(piece, shared[begin : begin + PIECE])
            require_finite(piece, limit, "gradient")
            if norm is not None:
                norm.add(piece)
            await asyncio.sleep(0)  # lets other calls run

    async def skip(self, lease: Lease) -> None: ...

    async def deliver(self, result: bytes, theta: Vector) -> None:
        await self._transfer.write(result)


def stated_theta_format(dtype: int) -> ThetaFormat:
    """The format for θ that a message names; float32 if it names none."""
    return theta_format(dtype) if dtype else FLOAT32
