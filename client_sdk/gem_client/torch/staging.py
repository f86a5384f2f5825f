"""Page-locked memory between parameters on CUDA devices and the session's buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gem_api.layout import Vector
from torch import Tensor


class Staging:
    """Two page-locked buffers: one for what a commit sends, one for the θ that it returns.

    Copies between a device and page-locked memory are only queued, so that the host waits once for all tensors instead of once
    for each. It holds 2·P·4 bytes.

    Args:
        parameters: The trained parameters.

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
