"""Training loops with one feature of PyTorch each, around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

RATE, RATE_ADAMW = 0.1, 0.003
_BATCHES, _SAMPLES = 20, 64
_OVERFLOWS = 3  # the step with an infinite gradient, if there is a GradScaler


@dataclass(frozen=True)
class Case:
    """A feature; without one, SGD on the server in float32."""

    steps: int = 10
    adamw: Any = ""  # who makes the steps of PyTorch's AdamW instead: "worker" or "server"
    decay: float = 0.0  # of SGD
    local: int = 1  # steps in a commit
    connect: Mapping[str, Any] = field(default_factory=dict)  # arguments of gem_client.connect
    amp: str = ""  # the dtype of autocast
    scaler: bool = False  # a GradScaler, and an overflow
    accumulate: int = 1  # batches in a step
    clip: float = 0.0  # the largest norm
    dtype: str = "float32"  # of the parameters
    channels_last: bool = False  # a convolutional model, in that format
    overlap: bool = False  # the next gradient is computed meanwhile
    stream: bool = False  # the loop runs on a stream of its own
    head_on_cpu: bool = False  # the last layer stays there
    compiled: str = ""  # the mode of torch.compile
    graphed: bool = False  # forward and backward are CUDA graphs
    tolerance: float = 1e-3  # of the difference, as a part of the whole movement


class _ToCpu(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cpu()


def network(case: Case, device: str) -> nn.Module:
    """The model, always with the same first values."""
    torch.manual_seed(3)
    if case.channels_last:
        images = [
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3),
            nn.GELU(),
            nn.Conv2d(16, 16, 3),
            nn.Flatten(),
            nn.Linear(256, 10),
        ]
        return nn.Sequential(*images).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
    hidden = [nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU()]
    body, head = nn.Sequential(*hidden).to(device, getattr(torch, case.dtype)), nn.Linear(96, 10)
    if case.head_on_cpu:
        return nn.Sequential(body, _ToCpu(), head)
    return nn.Sequential(body, head.to(device, getattr(torch, case.dtype)))


def values(model: nn.Module) -> Tensor:
    """All parameters: float32, shape (P,), on the CPU."""
    return torch.cat([each.detach().float().flatten().cpu() for each in model.parameters()])


class Loop:
    """The loop of a case on a model."""

    def __init__(self, case: Case, model: nn.Module, device: str) -> None:
        self._case, self._model, self._device = case, model, device
        random = torch.Generator().manual_seed(7)
        inputs = torch.randn(_BATCHES, _SAMPLES, 64, generator=random).to(device, getattr(torch, case.dtype))
        targets = torch.randint(0, 10, (_BATCHES, _SAMPLES), generator=random).to("cpu" if case.head_on_cpu else device)
        self._batches = list(zip(inputs, targets, strict=True))
        self._forward: Any = model
        if case.compiled:
            self._forward = torch.compile(model, mode=case.compiled)
        if case.graphed:
            self._forward = torch.cuda.make_graphed_callables(model, (inputs[0].clone(),))
        self._scaler = torch.amp.GradScaler(device, init_scale=2.0**10) if case.scaler else None

    def run(self, optimizer: torch.optim.Optimizer, step: Callable[[Tensor], Any]) -> None:
        """Trains; `step(loss)` makes a step of the optimizer."""
        for number in range(self._case.steps):
            loss = self.compute(number)
            if self._case.clip:
                nn.utils.clip_grad_norm_(self._model.parameters(), self._case.clip)
            if self._scaler is None:
                step(loss)
                continue
            if number == _OVERFLOWS:
                next(each.grad for each in self._model.parameters() if each.grad is not None).fill_(float("inf"))
            self._scaler.step(optimizer)
            self._scaler.update()

    def compute(self, number: int) -> Tensor:
        """Leaves the gradient of a step in the parameters. Returns the loss."""
        self._model.zero_grad()
        parts, amp = self._case.accumulate, self._case.amp
        for part in range(parts):
            inputs, targets = self._batches[(parts * number + part) % _BATCHES]
            with torch.autocast(self._device, getattr(torch, amp)) if amp else nullcontext():
                loss = functional.cross_entropy(self._forward(inputs), targets) / parts
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss
