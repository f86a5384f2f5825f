"""The session's buffers as tensors, one for each parameter; an accelerator has buffers of its own in between."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gem_api.layout import Vector
from torch import Tensor

from gem_client.session import Session

log = logging.getLogger("gem_client")


class SessionTensors:
    """A flat float32 tensor for each parameter, over its part of the session's buffers, which a new lease replaces; over
    memory of its own for an accelerator.

    Attributes:
        gradients: Over the buffer for the next commit.
        thetas: Over θ as last received.
        sends: Whether this process sends commits; of several ranks that are one worker, rank 0 alone does.
    """

    sends = True

    def __init__(self, session: Session, trained: Mapping[str, Tensor]) -> None:
        self._session = session
        self._parameters = list(trained.values())
        self._bound: Vector | None = None  # the session's θ that the tensors were made over
        self._staging: Staging | None = None
        self.gradients: Sequence[Tensor] = ()
        self.thetas: Sequence[Tensor] = ()

    @property
    def current(self) -> bool:
        """Whether the session still has the buffers that the tensors were made over."""
        return self._bound is self._session.theta

    def bind(self) -> None:
        """Replaces the tensors if the session has other buffers, or the parameters have moved to or from an accelerator."""
        staged = any(queues_copies(parameter) for parameter in self._parameters)
        if not self.current or staged != (self._staging is not None):
            self._bound = self._session.theta
            self._staging = (self._staging or Staging(self._parameters)) if staged else None
            self.gradients = self._staging.gradients if self._staging else self._split(self._session.gradient)
            self.thetas = self._staging.thetas if self._staging else self._split(self._session.theta)

    def written(self, loss: Any = None) -> tuple[Vector, float | None]:
        """The session's buffer for a commit, with what `gradients` hold, and the loss as a number: one wait for both."""
        if self._staging is not None:
            loss = self._staging.fetch(self._session.gradient, loss)
        return self._session.gradient, None if loss is None else number(loss)

    def load(self) -> None:
        """Copies the received θ into the parameters."""
        self.bind()
        if self._staging is not None:
            self._staging.put(self._session.theta)
        with torch.no_grad():
            for parameter, theta in zip(self._parameters, self.thetas, strict=True):
                receive(theta, parameter)
        if self._staging is not None:
            self._staging.loads_queued()

    def _split(self, packed: Vector) -> list[Tensor]:
        """One tensor per parameter, over its part of a packed buffer. They are not views of one tensor: each is saved alone."""
        ends = accumulate(parameter.numel() for parameter in self._parameters)
        return [torch.from_numpy(packed[end - p.numel() : end]) for p, end in zip(self._parameters, ends, strict=True)]


class Staging:
    """Two buffers on the host: one for what a commit sends, and its loss, one for the θ that it returns.

    Copies between an accelerator and these are only queued, so that the host waits once for all tensors instead of once for
    each. They hold 2·P·4 bytes, page-locked if the accelerator needs that to copy by itself.

    Attributes:
        gradients: The first buffer: a flat float32 tensor for each parameter.
        thetas: The second one, likewise.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        on = next(parameter for parameter in parameters if queues_copies(parameter)).device
        self._gradient, self._theta, self._loss = buffers((sum(sizes), sum(sizes), 1), on)
        self.gradients, self.thetas = self._gradient.split(sizes), self._theta.split(sizes)
        self._loads: list[torch.Event] = []

    def fetch(self, into: Vector, loss: Any = None) -> Any:
        """Waits until the copies to `gradients` have arrived, and copies them into the session's buffer. Returns the loss: one
        on an accelerator has come with them."""
        late = [loss.detach()] if isinstance(loss, Tensor) and queues_copies(loss) else []
        for value in late:
            send(value, self._loss)
        for event in marks([*self._parameters, *late]):
            event.synchronize()
        np.copyto(into, self._gradient.numpy())
        return self._loss if late else loss

    def put(self, theta: Vector) -> None:
        """Copies the session's θ into `thetas`, once the copies from it before are done."""
        for event in self._loads:
            event.synchronize()
        np.copyto(self._theta.numpy(), theta)

    def loads_queued(self) -> None:
        """The copies from `thetas` to the parameters are queued: the next `put` waits for them."""
        self._loads = marks(self._parameters)


def queues_copies(tensor: Tensor) -> bool:
    """Whether the tensor is on PyTorch's accelerator (CUDA, XPU, MPS and others), which copies while the host goes on."""
    if tensor.device.type == "cpu":
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and tensor.device.type == accelerator.type


def buffers(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Float32 tensors of these sizes on the host, which the device copies from and to. They are page-locked, except for
    Apple's GPUs, which share the host's memory."""
    if device.type != "mps":
        try:
            return [torch.empty(size, dtype=torch.float32, pin_memory=True) for size in sizes]
        except RuntimeError as error:  # there is not enough of it, or the accelerator has none
            why = str(error).splitlines()[0]
            log.warning("no page-locked memory for %d values, so that copies from and to %s take longer: %s",
                        sum(sizes), device, why)  # fmt: skip
    return [torch.empty(size, dtype=torch.float32) for size in sizes]


def marks(tensors: Sequence[Tensor]) -> list[torch.Event]:
    """An event for each accelerator that has one of the tensors, which occurs when all that is queued there now is done."""
    devices = {tensor.device for tensor in tensors if queues_copies(tensor)}
    return [torch.accelerator.current_stream(device).record_event() for device in devices]


def number(loss: Any) -> float:
    """A loss as a number."""
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def send(value: Tensor, into: Tensor) -> None:
    """Copies a tensor into a flat float32 tensor on the host; from an accelerator, the copy is only queued."""
    if queued := queues_copies(value):
        value = value.to(torch.float32)  # on the device: for a conversion by the host, the host would have to wait
    into.view(value.shape).copy_(value, non_blocking=queued)


def receive(theta: Tensor, parameter: Tensor) -> None:
    """Copies a flat float32 tensor on the host into a parameter; to an accelerator, the copy is only queued."""
    source, queued = theta.view_as(parameter), queues_copies(parameter)
    if queued and parameter.dtype != torch.float32:
        source = source.to(parameter.device, non_blocking=True)  # converted there, as in `send`
    parameter.copy_(source, non_blocking=queued)
