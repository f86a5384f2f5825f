"""The session's buffers as tensors, one for each parameter; for CUDA, page-locked memory lies in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from gem_api.layout import Vector
from torch import Tensor

from gem_client.session import Session


class SessionTensors:
    """A flat float32 tensor for each parameter, over its part of the session's buffers, which a new lease replaces; over
    page-locked memory for CUDA.

    Attributes:
        gradients: Over the buffer for the next commit.
        thetas: Over θ as last received.
    """

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
        """Replaces the tensors if the session has other buffers, or the parameters have moved to or from CUDA."""
        staged = on_cuda(self._parameters)
        if not self.current or staged != (self._staging is not None):
            self._bound = self._session.theta
            self._staging = (self._staging or Staging(self._parameters)) if staged else None
            self.gradients = self._staging.gradients if self._staging else self._split(self._session.gradient)
            self.thetas = self._staging.thetas if self._staging else self._split(self._session.theta)

    def written(self) -> Vector:
        """The session's buffer for a commit, with what `gradients` hold."""
        if self._staging is not None:
            self._staging.fetch(self._session.gradient)
        return self._session.gradient

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
    """Two page-locked buffers: one for what a commit sends, one for the θ that it returns.

    Copies between a device and page-locked memory are only queued, so that the host waits once for all tensors instead of once
    for each. It holds 2·P·4 bytes.

    Attributes:
        gradients: The first buffer: a flat float32 tensor for each parameter.
        thetas: The second one, likewise.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self._gradient, self._theta = page_locked(sum(sizes)), page_locked(sum(sizes))
        self.gradients, self.thetas = self._gradient.split(sizes), self._theta.split(sizes)
        self._loads: list[torch.cuda.Event] = []

    def fetch(self, into: Vector) -> None:
        """Waits until the copies to `gradients` have arrived, and copies them into the session's buffer."""
        for event in marks(self._parameters):
            event.synchronize()
        np.copyto(into, self._gradient.numpy())

    def put(self, theta: Vector) -> None:
        """Copies the session's θ into `thetas`, once the copies from it before are done."""
        for event in self._loads:
            event.synchronize()
        np.copyto(self._theta.numpy(), theta)

    def loads_queued(self) -> None:
        """The copies from `thetas` to the parameters are queued: the next `put` waits for them."""
        self._loads = marks(self._parameters)


def on_cuda(parameters: Sequence[Tensor]) -> bool:
    """Whether any of the parameters is on a CUDA device."""
    return any(parameter.is_cuda for parameter in parameters)


def page_locked(size: int) -> Tensor:
    """A float32 tensor of shape (size,) in memory that a CUDA device copies from and to by itself."""
    return torch.empty(size, dtype=torch.float32, pin_memory=True)


def marks(parameters: Sequence[Tensor]) -> list[torch.cuda.Event]:
    """An event for each device of the parameters, which occurs when all that is queued there now is done."""
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def send(value: Tensor, into: Tensor) -> None:
    """Copies a tensor into a flat float32 tensor on the host; from a CUDA device, the copy is only queued."""
    if value.is_cuda:
        value = value.to(torch.float32)  # on the device: for a conversion by the host, the host would have to wait
    into.view(value.shape).copy_(value, non_blocking=value.is_cuda)


def receive(theta: Tensor, parameter: Tensor) -> None:
    """Copies a flat float32 tensor on the host into a parameter; to a CUDA device, the copy is only queued."""
    source = theta.view_as(parameter)
    if parameter.is_cuda and parameter.dtype != torch.float32:
        source = source.to(parameter.device, non_blocking=True)  # converted there, as in `send`
    parameter.copy_(source, non_blocking=parameter.is_cuda)
