"""A flat gradient and a flat θ on each device that has parameters, so that a commit takes one copy to the host and one back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Parameters on one device that follow each other in θ: which part of it, and their flat gradient and θ (float32)."""

    device: torch.device
    part: slice
    gradient: Tensor
    theta: Tensor


class DeviceBuffers:
    """A flat gradient and a flat θ on each device, and their copies to and from the host.

    The copies of each direction have a stream, so that they run beside each other. Events order them: a copy comes after what
    the current stream was given before it, and θ is there before what the current stream is given next.

    Args:
        parameters: The parameters: P elements. The buffers take 8·P bytes on their devices.

    Raises:
        torch.OutOfMemoryError: A device has no room for that.

    Attributes:
        gradients: A float32 tensor for each parameter, in its shape, over the flat gradient of its device.
        thetas: Likewise over the flat θ.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._runs: list[Run] = []
        self.gradients: list[Tensor] = []
        self.thetas: list[Tensor] = []
        self._loss: Tensor | None = None
        begin = 0
        for device, some in groupby(parameters, lambda parameter: parameter.device):
            alike = list(some)
            sizes = [parameter.numel() for parameter in alike]
            run = Run(device, slice(begin, begin + sum(sizes)), *(flat(sum(sizes), device) for _ in range(2)))
            self._runs.append(run)
            begin = run.part.stop
            for whole, parts in ((run.gradient, self.gradients), (run.theta, self.thetas)):
                parts += [part.view(each.shape) for part, each in zip(whole.split(sizes), alike, strict=True)]
        devices = dict.fromkeys(run.device for run in self._runs)
        self._ways = {device: Ways(device) for device in devices if queues_copies(device)}

    def send(self, gradient: Tensor) -> None:
        """Begins to copy the gradients to the host (float32, shape (P,)). `wait` waits for them."""
        for run in self._runs:
            self.send_tensor(run.gradient, gradient[run.part])

    def send_tensor(self, value: Tensor, into: Tensor) -> None:
        """Begins to copy a tensor to one of the same shape and dtype on the host."""
        with self._copying(value.device, to_host=True) as queued:
            into.copy_(value, non_blocking=queued)

    @property
    def whole_gradient(self) -> Tensor | None:
        """The flat gradient, if a single accelerator has all parameters."""
        return self._runs[0].gradient if len(self._runs) == 1 and self._ways else None

    def send_loss(self, loss: Tensor, into: Tensor) -> bool:
        """Begins to copy a loss to the host (float32, shape (1,)). Returns False if it is on none of these devices."""
        if loss.device not in self._ways:
            return False
        loss = loss.detach().to(torch.float32)  # on the device: for a conversion by the host, the host would have to wait
        self._loss = loss  # until it has been copied: the device would give its memory to the next tensor
        self.send_tensor(loss, into.view(loss.shape))
        return True

    def load(self, theta: Tensor) -> None:
        """Begins to copy θ from the host (float32, shape (P,)) to `thetas`. What the devices are given next has it."""
        for run in self._runs:
            with self._copying(run.device, to_host=False) as queued:
                run.theta.copy_(theta[run.part], non_blocking=queued)

    def wait(self) -> None:
        """Waits until all copies have ended, once for each device: the host may then read the gradient and change θ."""
        for ways in self._ways.values():
            ways.wait()

    def wait_for_loads(self) -> None:
        """Waits until the copies of θ have ended: the host may then change it."""
        for ways in self._ways.values():
            ways.wait_for_loads()

    @contextmanager
    def _copying(self, device: torch.device, to_host: bool) -> Iterator[bool]:
        """Copies of one direction. Yields whether the device queues them."""
        if device not in self._ways:
            yield False
            return
        with self._ways[device].copying(to_host):
            yield True


class Ways:
    """The streams of a device's copies to the host (True) and from it (False). Apple's GPUs have one stream for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[bool, Any] = {}  # the events after the last copies
        try:
            self._streams = {to_host: torch.Stream(device) for to_host in (True, False)}
        except RuntimeError:
            self._streams = {}

    @contextmanager
    def copying(self, to_host: bool) -> Iterator[None]:
        """Copies that come after what the current stream was given. What it is given next comes after those from the host."""
        current, device = torch.accelerator.current_stream(self._device), torch.accelerator.current_device_index()
        stream = self._streams.get(to_host, current)
        if stream is current:
            yield
            self._last[to_host] = current.record_event()
            return
        stream.wait_stream(current)
        torch.accelerator.set_stream(stream)  # and its device
        try:
            yield
        finally:
            torch.accelerator.set_stream(current)
            torch.accelerator.set_device_index(device)
        self._last[to_host] = stream.record_event()
        if not to_host:
            current.wait_event(self._last[to_host])

    def wait(self) -> None:
        """Waits once until the last copies of both directions have ended."""
        if self._last:
            stream = self._streams.get(True, torch.accelerator.current_stream(self._device))
            for event in self._last.values():
                stream.wait_event(event)
            stream.record_event().synchronize()

    def wait_for_loads(self) -> None:
        """Waits until the last copies from the host have ended."""
        if False in self._last:
            self._last[False].synchronize()


def queues_copies(device: torch.device) -> bool:
    """Whether the device is PyTorch's accelerator (CUDA, XPU, MPS and others), which copies while the host goes on."""
    if device.type == "cpu":
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def flat(size: int, device: torch.device) -> Tensor:
    """A float32 tensor on the device, of shape (size,)."""
    try:
        return torch.empty(size, dtype=torch.float32, device=device)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(
            f"out of memory on {device}: a worker keeps a flat gradient and a flat θ there, of {4 * size / 1e6:.0f} MB each, "
            "besides the model. Put fewer workers on the device, or train a smaller model"
        ) from error
