"""The steps that a worker makes with an optimizer of PyTorch between two commits, and the change that they add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from gem_client.torch.arguments import parts_of
from gem_client.torch.staging import send


class LocalSteps:
    """Windows of steps of any `torch.optim` optimizer. Each window ends with a commit of x − θ, θ being where it began.

    The optimizer's state (its moments) continues from window to window, on parameters that the server has moved in between.

    Args:
        stepped: The tensors x that the optimizer steps, of any dtype and on any device. The change is taken in float32; in
            other dtypes, steps smaller than the dtype's resolution are lost, as they are without us.
        inner: The optimizer.

    Attributes:
        made: Number of steps in this window so far.
        began_on: The values that the window began on, one tensor for each of `stepped`; empty if they are not kept.
    """

    def __init__(self, stepped: Sequence[Tensor], inner: torch.optim.Optimizer) -> None:
        self._stepped, self._inner = stepped, inner
        self.began_on: list[Tensor] = []
        self._losses: list[float] = []
        self.made = 0

    @property
    def loss(self) -> float | None:
        """Mean of the losses of the window's steps; None if there were none."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def needs_closure(self) -> bool:
        """Whether the optimizer makes no step without a closure, as LBFGS."""
        closure = signature(self._inner.step).parameters.get("closure")
        return closure is not None and closure.default is Parameter.empty

    def begin(self) -> None:
        """Begins a window on the θ that the parameters hold now."""
        self._restart()
        with torch.no_grad():
            self.began_on = [
                before.copy_(x) if _alike(before, x) else x.detach().clone()
                for before, x in zip(self.began_on or self._stepped, self._stepped, strict=True)
            ]

    def step(self, rate: float, closure: Callable[[], Any] | None = None) -> Any:
        """Has the optimizer make a step and returns its closure's loss. It has a learning rate of its own, not `rate`."""
        return self._inner.step() if closure is None else self._inner.step(closure)

    def count(self, loss: float | None) -> None:
        """Counts a step, with its loss if it has one."""
        if loss is not None:
            self._losses.append(loss)
        self.made += 1

    def forget(self) -> None:
        """Resets the optimizer's state, so that a rejected window, which may hold a NaN, does not affect the next one."""
        for each in parts_of(self._inner):
            if isinstance(state := getattr(each, "state", None), dict):
                state.clear()

    def write(self, into: Sequence[Tensor]) -> None:
        """Writes the window's update into flat float32 tensors on the host (see `send`)."""
        with torch.no_grad():
            for x, before, update in zip(self._stepped, self.began_on, into, strict=True):
                send(x.to(torch.float32) - before.to(x.device, torch.float32), update)

    def _restart(self) -> None:
        self._losses.clear()
        self.made = 0


def _alike(before: Tensor, x: Tensor) -> bool:
    """Whether `before` is a buffer of ours that fits x as it is now."""
    return before is not x and (before.dtype, before.device) == (x.dtype, x.device)
