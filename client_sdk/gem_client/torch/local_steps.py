"""The steps of SGD that a worker makes by itself between two commits, and what they amount to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gem_api.hyperparameters import Hyperparameters
from gem_api.update_kind import UpdateKind
from torch import Tensor


class LocalSteps:
    """A window of local steps on a model's parameters; one window follows the other.

    One step, at η_t of the θ that the window began on, each parameter x by itself:

        g ← ∇L(x) + weight_decay·x
        v ← μ·v + g              μ = local_momentum; v starts at zero and goes on from window to window
        x ← x − η_t·(g + μ·v)    Nesterov's momentum as `torch.optim.SGD(nesterov=True)` has it; without momentum x ← x − η_t·g

    With V = −η·v that is V ← μ·V − η·g, x ← x + μ·V − η·g while η stays the same; where it falls, past gradients count at the
    present rate. A parameter without a gradient stays as it is, decay included.

    A window of k steps from θ amounts to

        delta       x − θ
        gradient    (1/k)·Σ g     (Accumulated Gradient Normalization, 1710.02368): each g at the worker's own x

    Args:
        parameters: What is trained. Steps are made in float32, where the parameters are; those of other dtypes are rounded
            from that.
        settings: The run's.
        kind: Which of the two the run takes.

    Attributes:
        made: Steps in this window so far.
    """

    def __init__(self, parameters: Sequence[Tensor], settings: Hyperparameters, kind: UpdateKind) -> None:
        self._parameters = parameters
        self._decay, self._momentum, self._kind = settings.weight_decay, settings.local_momentum, kind
        self._own = [p if p.dtype == torch.float32 else _zeros(p) for p in parameters]
        self._velocities = [_zeros(p) for p in parameters] if self._momentum else []
        self._kept = [_zeros(p) for p in parameters]  # θ as given, of which a delta is the change; or the sum of the gradients
        self._losses: list[float] = []
        self.made = 0

    @property
    def loss(self) -> float | None:
        """Mean of the losses that the window's steps were told of."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def begin(self) -> None:
        """A new window, on the θ that the parameters hold now."""
        self._losses.clear()
        self.made = 0
        self._follow()
        with torch.no_grad():
            for parameter, own, kept in zip(self._parameters, self._own, self._kept, strict=True):
                if own is not parameter:
                    own.copy_(parameter)
                if self._kind == "delta":
                    kept.copy_(own)
                else:
                    kept.zero_()

    def forget(self) -> None:
        """The velocity is zero again: a window that was refused shall not move the next one."""
        for velocity in self._velocities:
            velocity.zero_()

    def step(self, rate: float, loss: float | None) -> None:
        """One step of SGD with the gradients that the parameters have."""
        self._follow()
        with torch.no_grad():
            for position, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    self._move(position, parameter, dense(parameter.grad).to(torch.float32), rate)
        if loss is not None:
            self._losses.append(loss)
        self.made += 1

    def write(self, into: Sequence[Tensor]) -> None:
        """Puts what the window amounts to into float32 tensors, flat, on the host."""
        self._follow()
        with torch.no_grad():
            for own, kept, update in zip(self._own, self._kept, into, strict=True):
                update.view(own.shape).copy_(own - kept if self._kind == "delta" else kept / self.made)

    def _follow(self) -> None:
        """The parameters may have another dtype or device than before (`model.bfloat16()`, `model.cuda()`)."""
        with torch.no_grad():
            for position, parameter in enumerate(self._parameters):
                if self._own[position] is parameter and parameter.dtype != torch.float32:
                    self._own[position] = parameter.to(torch.float32)
                for buffers in (self._own, self._kept, self._velocities):
                    if buffers and buffers[position].device != parameter.device:
                        buffers[position] = buffers[position].to(parameter.device)

    def _move(self, position: int, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        own = self._own[position]
        if self._decay:
            gradient = gradient.add(own, alpha=self._decay)
        if self._kind == "gradient":
            self._kept[position].add_(gradient)
        if self._momentum:
            velocity = self._velocities[position].mul_(self._momentum).add_(gradient)
            gradient = gradient.add(velocity, alpha=self._momentum)
        own.add_(gradient, alpha=-rate)
        if own is not parameter:
            parameter.copy_(own)


def dense(gradient: Tensor) -> Tensor:
    """A gradient without sparseness."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
