"""The SGD steps that a worker makes between two commits, and the update that they add up to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gem_api.update_kind import UpdateKind
from torch import Tensor

from gem_client.torch.staging import send
from gem_client.torch.window import Window


class LocalSteps(Window):
    """Windows of local steps on a model's parameters. Each window ends with a commit.

    One step, with the η_t of the θ that the window began on, for each parameter x:

        g ← ∇L(x) + weight_decay·x
        v ← μ·v + g              μ = local_momentum; v starts at zero and continues from window to window
        x ← x − η_t·(g + μ·v)    Nesterov's momentum as `torch.optim.SGD(nesterov=True)` has it; without momentum x ← x − η_t·g

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
        super().__init__()
        self._parameters = parameters
        self._factors, self._decays, self._momentum, self._kind = factors, decays, momentum, kind
        self._own = [p if p.dtype == torch.float32 else _zeros(p) for p in parameters]
        self._velocities = [_zeros(p) for p in parameters] if self._momentum else []
        self._references = [
            _zeros(p) for p in parameters
        ]  # for a delta, θ at the window's beginning; else the sum of gradients

    def begin(self) -> None:
        """Begins a window on the θ that the parameters hold now."""
        self.restart()
        self._follow()
        with torch.no_grad():
            for parameter, own, reference in zip(self._parameters, self._own, self._references, strict=True):
                if own is not parameter:
                    own.copy_(parameter)
                if self._kind == "delta":
                    reference.copy_(own)
                else:
                    reference.zero_()

    def forget(self) -> None:
        """Sets the velocity to zero, so that a rejected window does not affect the next one."""
        for velocity in self._velocities:
            velocity.zero_()

    def step(self, rate: float, loss: float | None) -> None:
        """Makes one step of SGD with the parameters' gradients."""
        self._follow()
        with torch.no_grad():
            for position, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    self._move(position, parameter, dense(parameter.grad).to(torch.float32), rate)
        self.count(loss)

    def write(self, into: Sequence[Tensor]) -> None:
        """Writes the window's update into flat float32 tensors on the host (see `send`)."""
        self._follow()
        with torch.no_grad():
            for own, reference, update in zip(self._own, self._references, into, strict=True):
                send(own - reference if self._kind == "delta" else reference / self.made, update)

    def _follow(self) -> None:
        """Follows a change of the parameters' dtype or device (`model.bfloat16()`, `model.cuda()`)."""
        with torch.no_grad():
            for position, parameter in enumerate(self._parameters):
                if self._own[position] is parameter and parameter.dtype != torch.float32:
                    self._own[position] = parameter.to(torch.float32)
                for buffers in (self._own, self._references, self._velocities):
                    if buffers and buffers[position].device != parameter.device:
                        buffers[position] = buffers[position].to(parameter.device)

    def _move(self, position: int, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        own = self._own[position]
        if self._decays[position]:
            gradient = gradient.add(own, alpha=self._decays[position])
        if self._kind == "gradient":
            self._references[position].add_(gradient)
        if self._momentum:
            velocity = self._velocities[position].mul_(self._momentum).add_(gradient)
            gradient = gradient.add(velocity, alpha=self._momentum)
        own.add_(gradient, alpha=-rate * self._factors[position])
        if own is not parameter:
            parameter.copy_(own)


def dense(gradient: Tensor) -> Tensor:
    """The gradient as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
