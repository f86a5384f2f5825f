"""The steps that a worker makes with an optimizer of its own between two commits, and the change that they add up to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_client.torch.staging import send
from gem_client.torch.window import Window


class OwnSteps(Window):
    """Windows of steps of any `torch.optim` optimizer. Each window ends with a commit of x − θ, θ being where it began.

    The optimizer's state (its moments) continues from window to window, on parameters that the server has moved in between.

    Args:
        parameters: The trained parameters, of any dtype and on any device. The change is taken in float32; in other dtypes,
            steps smaller than the dtype's resolution are lost, as they are without us.
        inner: The optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor], inner: torch.optim.Optimizer) -> None:
        super().__init__()
        self._parameters = parameters
        self._inner = inner
        self._began_on: list[Tensor] = []

    def begin(self) -> None:
        """Begins a window on the θ that the parameters hold now."""
        self.restart()
        with torch.no_grad():
            self._began_on = [
                before.copy_(parameter) if _alike(before, parameter) else parameter.detach().clone()
                for before, parameter in zip(self._began_on or self._parameters, self._parameters, strict=True)
            ]

    def forget(self) -> None:
        """Resets the optimizer's state, so that a rejected window, which may hold a NaN, does not affect the next one."""
        self._inner.state.clear()

    def step(self, rate: float, loss: float | None) -> None:
        """Counts a step that the optimizer has made. Its learning rate is its own: `rate` does not matter."""
        self.count(loss)

    def write(self, into: Sequence[Tensor]) -> None:
        """Writes the window's change into flat float32 tensors on the host (see `send`)."""
        with torch.no_grad():
            for parameter, before, update in zip(self._parameters, self._began_on, into, strict=True):
                send(parameter.to(torch.float32) - before.to(parameter.device, torch.float32), update)


def _alike(before: Tensor, parameter: Tensor) -> bool:
    """Whether `before` is a buffer of ours that fits the parameter as it is now."""
    return before is not parameter and (before.dtype, before.device) == (parameter.dtype, parameter.device)
