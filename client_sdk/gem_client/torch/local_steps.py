"""The steps that a worker makes between two commits, with any optimizer of PyTorch or by the server's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature, unwrap
from typing import Any

import torch
from gem_api.update_kind import UpdateKind
from torch import Tensor

from gem_client.torch.arguments import parts_of
from gem_client.torch.device_buffers import queues_copies
from gem_client.torch.parameters import dense, evaluate
from gem_client.torch.session_tensors import number


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

    def __init__(self, stepped: list[Tensor], inner: torch.optim.Optimizer) -> None:
        self._stepped, self._inner = stepped, inner
        self.began_on: list[Tensor] = []
        self._losses: list[Any] = []
        self.made = 0

    @property
    def loss(self) -> Any:
        """Mean of the losses of the window's steps, on their device; None if there were none."""
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

    def count(self, loss: Any) -> None:
        """Counts a step, with its loss if it has one. To read one from an accelerator would wait for the step; what a CUDA
        graph computes, the next replay overwrites."""
        if loss is not None:
            late = isinstance(loss, Tensor) and queues_copies(loss.device)
            self._losses.append(loss.detach().to(torch.float32, copy=True) if late else number(loss))
        self.made += 1

    def forget(self) -> None:
        """Resets the optimizer's state, so that a rejected window, which may hold a NaN, does not affect the next one."""
        for each in parts_of(self._inner):
            if isinstance(state := getattr(each, "state", None), dict):
                state.clear()

    def write(self, into: list[Tensor]) -> None:
        """Writes the window's update into float32 tensors of the same shapes."""
        began_on = [before.to(x.device) for x, before in zip(self._stepped, self.began_on, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(into, self._stepped)
            torch._foreach_sub_(into, began_on)

    def _restart(self) -> None:
        self._losses.clear()
        self.made = 0


class LocalSgd(LocalSteps):
    """Windows of steps of SGD, for loops that bring parameters alone, with Nesterov momentum if the run has `local_momentum` μ.

    One step, with the η_t of the θ that the window began on, for each parameter x:

        g ← ∇L(x) + weight_decay·x
        v ← μ·v + g              v starts at zero and continues from window to window
        x ← x − η_t·(g + μ·v)    without momentum x ← x − η_t·g

    With V = −η·v and a constant η this is V ← μ·V − η·g, x ← x + μ·V − η·g. If η falls, past gradients count at the present
    rate. A parameter without a gradient does not change, not even by decay.

    The commit of a window of k steps from θ holds

        delta       x − θ
        gradient    (1/k)·Σ g     (Accumulated Gradient Normalization, 1710.02368): each g at the worker's own x

    Steps are made in float32, on the parameters' device; parameters of other dtypes are rounded from the result. `factors` and
    `decays` have what the learning rate is multiplied by, and the weight decay, for each parameter.
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

    def write(self, into: list[Tensor]) -> None:
        """Writes the window's update into float32 tensors of the same shapes."""
        if self._sums:
            torch._foreach_copy_(into, self._sums)
            torch._foreach_div_(into, self.made)
        else:
            super().write(into)

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


def _alike(before: Tensor, x: Tensor) -> bool:
    """Whether `before` is a buffer of ours that fits x as it is now."""
    return before is not x and (before.dtype, before.device) == (x.dtype, x.device)
