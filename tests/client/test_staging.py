"""Page-locked memory between CUDA parameters and the session: with a device of the test's own, whose copies arrive late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_client.torch import Optimizer, local_steps, session_tensors
from gem_client.torch import optimizer as optimizer_module
from gem_client.torch.session_tensors import Staging
from kit.server import config, serving
from torch import Tensor, nn

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS = 12
RUNS: dict[str, tuple[Hyperparameters, dict[str, Any]]] = {
    "gradients": (Hyperparameters(rule="downpour", learning_rate=0.1), {}),
    "weight decay": (Hyperparameters(rule="downpour", learning_rate=0.1, weight_decay=0.01), {}),
    "overlap": (Hyperparameters(rule="downpour", learning_rate=0.1), {"overlap": True}),
    "local steps": (Hyperparameters(rule="agn", learning_rate=0.1, local_steps=3), {}),
    "own steps": (Hyperparameters(rule="downpour", optimizer="worker", local_steps=3), {}),
}


class LateDevice:
    """Stands for a CUDA device: a copy to the host is carried out when somebody waits for an event."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def send(self, value: Tensor, into: Tensor) -> None:
        value = value.detach().clone()
        self.queue.append(lambda: into.view(value.shape).copy_(value))

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def take_the_place_of_cuda(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(session_tensors, "page_locked", lambda size: torch.full((size,), float("nan")))
        patch.setattr(session_tensors, "marks", lambda parameters: [self])
        patch.setattr(session_tensors, "on_cuda", lambda parameters: True)
        patch.setattr(local_steps, "send", self.send)
        patch.setattr(optimizer_module, "copy_gradient", self.copy_gradient)

    def copy_gradient(self, parameter: Tensor, into: Tensor, decay: float) -> None:
        assert parameter.grad is not None
        self.send(parameter.grad.add(parameter, alpha=decay), into)


def trained(settings: Hyperparameters, options: dict[str, Any], device: str = "cpu") -> Any:
    """The run's θ after some steps of one worker: float32, shape (P,)."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    inputs = torch.randn(64, 4).to(device)
    targets = inputs.sum(1, keepdim=True)
    given: Any = model.named_parameters()
    if settings.optimizer == "worker":
        given = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.5)
    with serving(config(settings)) as live, connect(live.address) as session:
        optimizer = Optimizer(given, session, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step(loss=loss)
        optimizer.finish()
        held = live.on_loop(lambda: live.core.central.theta.copy())
        with torch.no_grad():
            own = np.concatenate([parameter.cpu().numpy().ravel() for parameter in model.parameters()])
        np.testing.assert_array_equal(own, held, err_msg="the worker's parameters are not the θ of its last commit")
        return held


@pytest.mark.parametrize("run", RUNS)
def test_a_run_through_page_locked_memory_is_the_run_without(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(*RUNS[run])
    device = LateDevice()
    device.take_the_place_of_cuda(monkeypatch)
    np.testing.assert_array_equal(trained(*RUNS[run]), expected)
    assert not device.queue, "copies that nobody waited for"


def test_the_buffer_of_theta_is_not_overwritten_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies to the parameters that the last `put` began must be done first."""
    read: list[float] = []

    class Reading:
        def synchronize(self) -> None:
            read.append(buffers.thetas[0][0].item())

    monkeypatch.setattr(session_tensors, "page_locked", torch.zeros)
    monkeypatch.setattr(session_tensors, "marks", lambda parameters: [Reading()])
    buffers = Staging([torch.zeros(2), torch.zeros(3)])
    buffers.put(np.full(5, 1, np.float32))
    buffers.loads_queued()
    buffers.put(np.full(5, 2, np.float32))
    assert read == [1.0]
    assert [theta.tolist() for theta in buffers.thetas] == [[2, 2], [2, 2, 2]]


@needs_gpu
@pytest.mark.parametrize("run", RUNS)
def test_a_run_on_a_gpu_is_that_on_the_cpu_within_rounding(run: str) -> None:
    np.testing.assert_allclose(trained(*RUNS[run], device="cuda"), trained(*RUNS[run]), rtol=1e-3, atol=1e-4)


@needs_gpu
def test_the_buffers_of_parameters_on_a_gpu_are_page_locked() -> None:
    buffers = Staging([torch.zeros(2, device="cuda"), torch.zeros(3, device="cuda")])
    assert all(tensor.is_pinned() for tensor in (*buffers.gradients, *buffers.thetas))
