"""Local steps of SGD with the server's settings, for loops that bring parameters alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any

import torch
from gem_api.update_kind import UpdateKind
from torch import Tensor

from gem_client.torch.local_steps import LocalSteps
from gem_client.torch.parameters import dense, evaluate
from gem_client.torch.staging import send


class LocalSgd(LocalSteps):
    """Windows of steps of PyTorch's SGD, with Nesterov momentum if the run has `local_momentum` μ.

    One step, with the η_t of the θ that the window began on, for each parameter x:

        g ← ∇L(x) + weight_decay·x
        v ← μ·v + g              v starts at zero and continues from window to window
        x ← x − η_t·(g + μ·v)    without momentum x ← x − η_t·g

    With V = −η·v and a constant η this is V ← μ·V − η·g, x ← x + μ·V − η·g. If η falls, past gradients count at the present
    rate. A parameter without a gradient does not change, not even by decay.

    The commit of a window of k steps from θ holds

        delta       x − θ
        gradient    (1/k)·Σ g     (Accumulated Gradient Normalization, 1710.02368): each g at the worker's own x

    Args:
        parameters: The trained parameters. Steps are made in float32, on the parameters' device; parameters of other dtypes are
            rounded from the result.
        factors: What the learning rate is multiplied by, for each parameter.
        decays: The weight decay of each parameter.
        momentum: μ.
        kind: What the run's commits hold, "delta" or "gradient".
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        factors: Sequence[float],
        decays: Sequence[float],
        momentum: float,
        kind: UpdateKind,
    ) -> None:
        # SGD gets tensors of ours, whose gradients may be replaced: x has the memory of its parameter if that is float32.
        own = [p.detach() if p.dtype == torch.float32 else p.detach().to(torch.float32) for p in parameters]
        groups = [{"params": [x], "factor": f, "weight_decay": d} for x, f, d in zip(own, factors, decays, strict=True)]
        super().__init__(own, _Sgd(groups, momentum=momentum, nesterov=momentum > 0))
        self._parameters = parameters
        self._sums = [torch.zeros_like(x) for x in own] if kind == "gradient" else []

    def begin(self) -> None:
        """Begins a window on the θ that the parameters hold now."""
        self._follow()
        with torch.no_grad():
            for x, parameter in self._rounded():
                x.copy_(parameter)
            for total in self._sums:
                total.zero_()
        if self._sums:
            self._restart()
        else:
            super().begin()

    def step(self, rate: float, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of SGD with the parameters' gradients at the server's `rate`, and returns the closure's loss."""
        loss = evaluate(closure)
        self._follow()
        for x, parameter, group in zip(self._stepped, self._parameters, self._inner.param_groups, strict=True):
            group["lr"] = rate * group["factor"]
            x.grad = None if parameter.grad is None else dense(parameter.grad).to(torch.float32)
        with torch.no_grad():
            for total, group in zip(self._sums, self._inner.param_groups, strict=False):
                (x,), decay = group["params"], group["weight_decay"]
                if x.grad is not None:
                    total.add_(x.grad.add(x, alpha=decay) if decay else x.grad)
            self._inner.step()
            for x, parameter in self._rounded():
                parameter.copy_(x)
        for x in self._stepped:
            x.grad = None  # so that the loop can free its own
        return loss

    def write(self, into: Sequence[Tensor]) -> None:
        """Writes the window's update into flat float32 tensors on the host (see `send`)."""
        if not self._sums:
            super().write(into)
        for total, update in zip(self._sums, into, strict=False):
            send(total / self.made, update)

    def _rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Each x whose parameter holds a rounded copy of it, and that parameter."""
        return [(x, p) for x, p in zip(self._stepped, self._parameters, strict=True) if p.dtype != torch.float32]

    def _follow(self) -> None:
        """Follows a change of the parameters' dtype, device or memory (`model.bfloat16()`, `model.cuda()`)."""
        for x, parameter in zip(self._stepped, self._parameters, strict=True):
            if parameter.dtype == torch.float32 and x.data_ptr() != parameter.data_ptr():
                x.data = parameter.detach()
            elif x.device != parameter.device:
                x.data = x.to(parameter.device)
        for x, state in self._inner.state.items():
            state["momentum_buffer"] = state["momentum_buffer"].to(x.device)
        self._sums = [total.to(x.device) for total, x in zip(self._sums, self._stepped, strict=False)]


class _Sgd(torch.optim.SGD):
    """PyTorch's SGD without PyTorch's compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        bare(torch.optim.Optimizer.add_param_group)(self, param_group)

    def step(self, closure: Any = None) -> Any:
        return bare(torch.optim.SGD.step)(self, closure)


def bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """Removes PyTorch's wrappers that keep a method from its compiler. They import the compiler, which costs each worker 75 MB
    and a second. SGD's own also turns gradients off: call it under `torch.no_grad`."""
    unwrapped: Callable[..., Any] = unwrap(method)
    return unwrapped
