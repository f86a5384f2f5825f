"""The session's buffers as tensors, one for each parameter; of parameters on an accelerator, there are buffers in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gem_api.framing import empty_pages
from gem_api.layout import Vector
from torch import Tensor

from gem_client.run.encoded import EncodedUpdate
from gem_client.run.host_buffers import HostBuffers
from gem_client.session import Session
from gem_client.torch.device_buffers import DeviceBuffers
from gem_client.torch.device_encoder import DeviceEncoder
from gem_client.torch.page_locked import HostArray, PageLocks


class SessionTensors:
    """A float32 tensor for each parameter, in its shape and on its device. On the CPU they lie over the session's buffers,
    which a new lease replaces. Those on an accelerator are copied from and to these.

    Attributes:
        gradients: What the next commit sends.
        thetas: θ as it was loaded last.
        sends: Whether this process sends commits; of several ranks that are one worker, rank 0 alone does.
    """

    sends = True

    def __init__(self, session: Session, trained: Mapping[str, Tensor]) -> None:
        self._session = session
        self._parameters = list(trained.values())
        self._bound: tuple[Vector, Vector] | None = None  # the session's buffers that the tensors were made for
        self._devices: list[torch.device] = []  # of the parameters
        self._on_devices: OnDevices | None = None
        self._loss: Any = None
        self.gradients: list[Tensor] = []
        self.thetas: list[Tensor] = []

    @property
    def current(self) -> bool:
        """Whether the session still has the buffers that the tensors were made for."""
        gradient, theta = self._bound or (None, None)
        return gradient is self._session.gradient and theta is self._session.theta

    def bind(self) -> None:
        """Replaces the tensors if the session has other buffers, or the parameters have moved to another device."""
        if self._on_devices is not None:
            self._on_devices.settle()
        devices = [parameter.device for parameter in self._parameters]
        moved = devices != self._devices
        if self.current and not moved:
            return
        self._devices = devices
        if moved:
            if self._on_devices is not None:
                self._on_devices.release()
            on_cpu = all(device.type == "cpu" for device in devices)
            self._on_devices = None if on_cpu else OnDevices(self._session.host_buffers, self._parameters)
        if self._on_devices is None:
            self._bound = gradient, theta = self._session.gradient, self._session.theta
            self.gradients, self.thetas = self._split(gradient), self._split(theta)
        else:
            self._bound = self._on_devices.bind()
            self.gradients, self.thetas = self._on_devices.buffers.gradients, self._on_devices.buffers.thetas

    def send(self, loss: Any = None) -> None:
        """`gradients` and the loss are those of the next commit: begins to copy them to the host."""
        self._loss = loss if self._on_devices is None else self._on_devices.send(loss)

    def sent(self) -> tuple[Any, float | None]:
        """What `send` was given, as `Session.commit` takes it, and the loss as a number: one wait for all copies, those of θ
        too, which the commit replaces."""
        update = self._session.gradient if self._on_devices is None else self._on_devices.sent()
        loss, self._loss = self._loss, None
        return update, None if loss is None else number(loss)

    def load(self) -> None:
        """Copies the received θ into the parameters."""
        self.bind()
        if self._on_devices is not None:
            self._on_devices.load()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self.thetas)

    def wait_for_loads(self) -> None:
        """Waits until θ has been copied from the session's buffer."""
        if self._on_devices is not None:
            self._on_devices.buffers.wait_for_loads()

    def _split(self, packed: Vector) -> list[Tensor]:
        """One tensor per parameter, over its part of a packed buffer. They are not views of one tensor: each is saved alone."""
        ends = accumulate(parameter.numel() for parameter in self._parameters)
        parts = zip(self._parameters, ends, strict=True)
        return [torch.from_numpy(packed[end - each.numel() : end]).view(each.shape) for each, end in parts]


class OnDevices:
    """What lies between the session's buffers and parameters on an accelerator: flat tensors there, and page-locked memory.

    Attributes:
        buffers: The flat tensors.
    """

    def __init__(self, host: HostBuffers, parameters: Sequence[Tensor]) -> None:
        device = next(each.device for each in parameters if each.device.type != "cpu")
        self.buffers = DeviceBuffers(parameters)
        self._locks = PageLocks(device, self.buffers.wait)
        self.release = self._locks.release
        host.at_end(self.release)
        self._host = host
        self._encoder: DeviceEncoder | None = None
        self._encodes = False  # whether the next commit was encoded

    def bind(self) -> tuple[Vector, Vector]:
        """Copies from and to the session's present buffers from now on, and returns them: for the gradient, and θ."""
        self.release()
        if self._locks.in_place:
            self._host.move_into_pages()
        self._array, theta = self._host.gradient, self._host.theta
        self._theta, self._loss = self._locks.lock(theta), self._locks.lock(empty_pages(1))
        self._gradient: HostArray | None = None
        self._data: HostArray | None = None  # the bytes of an encoded gradient
        return self._array, theta

    def settle(self) -> None:
        """The last commit is done: the gradient is about to be overwritten."""
        if self._encoder is not None:
            self._encoder.settle()

    def send(self, loss: Any) -> Any:
        """Begins to copy the gradient, and the loss if it is on these devices. Returns where the loss will be."""
        parts, whole = self._host.parts_to_encode, self.buffers.whole_gradient
        self._encodes = whole is not None and bool(parts)
        if whole is not None and parts:
            self._encoder = self._encoder or DeviceEncoder(self._host.gradient_format, whole)
            data = self._encoder.encode(parts)
            if self._data is None or self._data.tensor.shape != data.shape:
                self._data = self._locks.lock(empty_pages(-(-len(data) // 4)).view(np.uint8)[: len(data)])
            self.buffers.send_tensor(data, self._data.tensor)
        else:
            self._gradient = self._gradient or self._locks.lock(self._array)
            self.buffers.send(self._gradient.tensor)
        if isinstance(loss, Tensor) and self.buffers.send_loss(loss, self._loss.tensor):
            return self._loss.tensor
        return loss

    def sent(self) -> Vector | EncodedUpdate:
        """Waits until all copies have ended. Returns what `send` was given, for a commit."""
        self.buffers.wait()
        if self._encodes and self._encoder is not None and self._data is not None:
            return self._encoder.update(self._data.tensor.numpy())
        if self._gradient is not None:
            self._gradient.take()
        return self._array

    def load(self) -> None:
        """Begins to copy the session's θ to the devices."""
        if self._theta.beside:
            self.buffers.wait_for_loads()
            self._theta.put()
        self.buffers.load(self._theta.tensor)


def number(loss: Any) -> float:
    """A loss as a number."""
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
