"""What distinguishes DDP, Local SGD and DiLoCo: when workers wait for each other, and what they exchange then."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.finals.apart import cosine
from benchmarks.versus.setup import Setup

LOCAL_STEPS = 8  # of Local SGD, between two averages
OUTER_STEPS = 16  # of DiLoCo, between two outer steps
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9  # as in the paper
_MOMENTUM = 0.9
RATES = {"adamw": (0.001, 0.003, 0.01, 0.03), "sgd": (0.01, 0.03, 0.1, 0.3)}  # to try first, by optimizer

Loss = Callable[[nn.Module], Tensor]


def optimizer_of(kind: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """What a user would take for the model."""
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=_MOMENTUM)


def set_rate(optimizer: Any, setup: Setup, steps: int) -> None:
    """Sets the learning rate of the next step, if the run has a schedule. `steps` were made before it."""
    if setup.schedule:
        for group in optimizer.param_groups:
            group["lr"] = setup.rate * cosine(steps, setup.schedule)


class Method(ABC):
    """A model in training.

    Args:
        model: Its parameters are θ.
        kind: The optimizer, "adamw" or "sgd".
        rate: Its learning rate.
        wait: Called when the gradient is computed; returns when the profile says that it would be.
    """

    every = 1  # steps between two exchanges

    def __init__(self, model: nn.Module, kind: str, rate: float, wait: Callable[[], None]) -> None:
        self.model, self.wait = model, wait
        self.optimizer: Any = optimizer_of(kind, model, rate)

    @abstractmethod
    def gradient(self, loss: Loss) -> None:
        """Computes a gradient, and waits until it is due."""

    def step(self) -> None:
        self.optimizer.step()

    @abstractmethod
    def exchange(self) -> None:
        """One exchange alone: its overhead is measured."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Ddp(Method):
    """DistributedDataParallel. Its buckets hold 1 MiB and more, so these models have one, which is complete when the last
    gradient is. So the all-reduce begins when the step is due, as if computing had taken so long."""

    def __init__(self, model: nn.Module, kind: str, rate: float, wait: Callable[[], None]) -> None:
        super().__init__(model, kind, rate, wait)
        self._parallel = DistributedDataParallel(model)
        self._parallel.register_comm_hook(None, self._reduce)

    def gradient(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        loss(self._parallel).backward()

    def exchange(self) -> None:
        dist.all_reduce(_packed(self.model))
        self.optimizer.step()

    # DDP reads these annotations, so they must not be text: this file lacks the import that makes them text.
    def _reduce(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if bucket.index() == 0:
            self.wait()
        return allreduce_hook(cast(dist.ProcessGroup, dist.group.WORLD), bucket)


class LocalSgd(Method):
    """PyTorch's own Local SGD: each worker makes steps of its own; every 8th is followed by the average of all models."""

    every = LOCAL_STEPS

    def __init__(self, model: nn.Module, kind: str, rate: float, wait: Callable[[], None]) -> None:
        super().__init__(model, kind, rate, wait)
        from torch.distributed.optim import PostLocalSGDOptimizer  # here, because its import warns of what it uses itself

        averager = PeriodicModelAverager(period=LOCAL_STEPS, process_group=dist.group.WORLD)
        averager.step = 1  # its first average would come after the first step instead of the eighth
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)

    def gradient(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.wait()

    def exchange(self) -> None:
        dist.all_reduce(_packed(self.model))


class DiLoCo(Method):
    """Synchronous DiLoCo (Douillard et al. 2023): after 16 local steps, Nesterov SGD on the mean of the models' changes."""

    every = OUTER_STEPS

    def __init__(self, model: nn.Module, kind: str, rate: float, wait: Callable[[], None]) -> None:
        super().__init__(model, kind, rate, wait)
        self._outer = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        self._outer_optimizer = torch.optim.SGD(self._outer, lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True)
        self._made = 0

    def gradient(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.wait()

    def step(self) -> None:
        self.optimizer.step()
        self._made += 1
        if self._made % OUTER_STEPS == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        change = torch.cat([(old - new).reshape(-1) for old, new in zip(self._outer, self.model.parameters(), strict=True)])
        dist.all_reduce(change)
        torch.nn.utils.vector_to_parameters(
            change / dist.get_world_size(), gradients := [torch.empty_like(p) for p in self._outer]
        )
        for parameter, gradient in zip(self._outer, gradients, strict=True):
            parameter.grad = gradient
        self._outer_optimizer.step()
        for parameter, outer in zip(self.model.parameters(), self._outer, strict=True):
            parameter.copy_(outer)

    def state(self) -> dict[str, Any]:
        outer = {
            "outer": [parameter.detach() for parameter in self._outer],
            "outer_optimizer": self._outer_optimizer.state_dict(),
        }
        return super().state() | outer | {"made": self._made}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        for parameter, saved in zip(self._outer, state["outer"], strict=True):
            parameter.copy_(saved)
        self._outer_optimizer.load_state_dict(state["outer_optimizer"])
        self._made = state["made"]


def _packed(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([parameter.reshape(-1) for parameter in model.parameters()])
