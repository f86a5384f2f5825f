"""Parameters on an accelerator: what a step copies and waits for, and that nothing is used before it has arrived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from client.torch_helpers import network
from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_client.torch import Optimizer
from gem_client.torch.parameters import require_apart
from gem_client.torch.session_tensors import Staging, receive
from kit.accelerator import TO_DEVICE, TO_HOST, WAITS, Accelerator, raw
from kit.server import Live, config, serving
from torch import Tensor, nn

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS = 12
PLAIN = Hyperparameters(rule="downpour", learning_rate=0.1)
RUNS: dict[str, tuple[Hyperparameters, dict[str, Any]]] = {
    "gradients": (PLAIN, {}),
    "weight decay": (Hyperparameters(rule="downpour", learning_rate=0.1, weight_decay=0.01), {}),
    "AdamW on the server": (Hyperparameters(rule="downpour", learning_rate=0.1, optimizer="adamw"), {}),
    "overlap": (PLAIN, {"overlap": True}),
    "local steps": (Hyperparameters(rule="agn", learning_rate=0.1, local_steps=3), {}),
    "own steps": (Hyperparameters(rule="downpour", optimizer="worker", local_steps=3), {}),
}
CPU = torch.device("cpu")


@contextmanager
def worker(
    settings: Hyperparameters, options: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Live, nn.Module, Optimizer]]:
    """A server, and the only worker of its run, with its model on the device."""
    model = network(1).to(device, dtype)
    given: Any = model.named_parameters()
    if settings.optimizer == "worker":
        given = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.5)
    with serving(config(settings)) as live, connect(live.address) as session:
        yield live, model, Optimizer(given, session, **options)


def compute(
    model: nn.Module, optimizer: Optimizer, step: int, device: torch.device, scaler: torch.amp.GradScaler | None = None
) -> Tensor:
    """The loss of a step, of which the gradients are computed, scaled if there is a scaler."""
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).to(device, dtype)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    (scaler.scale(loss) if scaler else loss).backward()
    return loss


def trained(settings: Hyperparameters, options: dict[str, Any], device: torch.device = CPU) -> Any:
    """The run's θ after some steps of one worker: float32, shape (P,)."""
    with worker(settings, options, device) as (live, model, optimizer):
        for step in range(STEPS):
            optimizer.step(loss=compute(model, optimizer, step, device))
        optimizer.finish()
        held = live.on_loop(lambda: live.core.central.theta.copy())
        own = np.concatenate([parameter.detach().cpu().numpy().ravel() for parameter in model.parameters()])
        if settings.optimizer != "adamw":  # which hands out a point ahead of θ
            np.testing.assert_array_equal(own, held, err_msg="the worker's parameters are not the θ of its last commit")
        return held


def reported(live: Live) -> float:
    """The loss of the run's last commit."""
    return float(live.on_loop(lambda: next(iter(live.core.leases.live.values())).last_applied.loss))


@pytest.mark.parametrize("run", RUNS)
def test_a_run_on_an_accelerator_is_the_run_on_the_cpu(run: str, accelerator: Accelerator) -> None:
    np.testing.assert_array_equal(trained(*RUNS[run], device=accelerator.device), trained(*RUNS[run]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", RUNS)
def test_a_step_waits_once_for_the_accelerator_and_a_local_step_not_at_all(
    run: str, dtype: torch.dtype, accelerator: Accelerator
) -> None:
    """The gradient and the loss come together. Without the first steps, in which all values are compared."""
    settings, options = RUNS[run]
    with worker(settings, options, accelerator.device, dtype) as (_, model, optimizer):
        for step in range(STEPS + 3):
            loss = compute(model, optimizer, step, accelerator.device)
            accelerator.counts.clear()
            optimizer.step(loss=loss)
            commits = (step + 1) % settings.local_steps == 0
            if step >= STEPS:
                assert accelerator.counts == ({TO_HOST: 4 + 1, TO_DEVICE: 4, WAITS: 1} if commits else {})


def test_a_grad_scaler_adds_its_own_wait_and_no_other(accelerator: Accelerator) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with worker(PLAIN, {}, accelerator.device) as (_, model, optimizer):
        for step in range(STEPS):
            loss = compute(model, optimizer, step, accelerator.device, scaler)
            accelerator.counts.clear()
            scaler.step(optimizer, loss=loss)
            scaler.update()
        assert accelerator.counts == {TO_HOST: 4 + 1, TO_DEVICE: 4, WAITS: 2}


def test_losses_of_local_steps_are_their_own_if_a_cuda_graph_writes_all_into_one_tensor(accelerator: Accelerator) -> None:
    loss = torch.zeros(()).to(accelerator.device)
    with worker(*RUNS["local steps"], accelerator.device) as (live, model, optimizer):
        for step in range(3):
            compute(model, optimizer, step, accelerator.device)
            loss.fill_(step)
            optimizer.step(loss=loss)
        assert reported(live) == 1.0


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_the_loss_of_a_commit_is_that_of_its_gradient(options: dict[str, Any], accelerator: Accelerator) -> None:
    with worker(PLAIN, options, accelerator.device) as (live, model, optimizer):
        for step in range(3):
            loss = compute(model, optimizer, step, accelerator.device)
            optimizer.step(loss=loss)
        optimizer.finish()
        assert reported(live) == loss.item()


def test_the_buffer_of_theta_is_not_overwritten_while_it_is_read(accelerator: Accelerator) -> None:
    """The copies to the parameters that the last `put` began must be done first."""
    parameters = [torch.zeros(2).to(accelerator.device), torch.zeros(3).to(accelerator.device)]
    buffers = Staging(parameters)
    buffers.put(np.full(5, 1, np.float32))
    for theta, parameter in zip(buffers.thetas, parameters, strict=True):
        receive(theta, parameter)
    buffers.loads_queued()
    buffers.put(np.full(5, 2, np.float32))
    assert [raw(parameter).tolist() for parameter in parameters] == [[1, 1], [1, 1, 1]]
    assert [theta.tolist() for theta in buffers.thetas] == [[2, 2], [2, 2, 2]]


def test_without_page_locked_memory_copies_go_on_and_the_log_says_so(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch has none for the accelerator in Python."""
    buffers = Staging([torch.ones(2).to(accelerator.device)])
    assert [tensor.shape for tensor in (*buffers.gradients, *buffers.thetas)] == [(2,), (2,)]
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "no page-locked memory for 5 values, so that copies from and to standin:0 take longer"
    ]


def test_parameters_are_apart_if_the_device_has_no_addresses_and_they_do_not_share_memory() -> None:
    """As on Apple's GPUs, where `data_ptr` is that of an object; on PyTorch's device without memory it is always 0."""
    memory = torch.zeros(6, device="meta")
    require_apart({"one": torch.zeros(4, device="meta"), "two": torch.zeros(4, device="meta")})
    require_apart({"one": memory[:3], "two": memory[3:]})
    with pytest.raises(InvalidRequest, match="'one' and 'two' share memory"):
        require_apart({"one": memory[:4], "two": memory[3:]})


@needs_gpu
@pytest.mark.parametrize("run", RUNS)
def test_a_run_on_a_gpu_is_that_on_the_cpu_within_rounding(run: str) -> None:
    np.testing.assert_allclose(trained(*RUNS[run], device=torch.device("cuda")), trained(*RUNS[run]), rtol=1e-3, atol=1e-4)


@needs_gpu
def test_the_buffers_of_parameters_on_a_gpu_are_page_locked() -> None:
    buffers = Staging([torch.zeros(2, device="cuda"), torch.zeros(3, device="cuda")])
    assert all(tensor.is_pinned() for tensor in (*buffers.gradients, *buffers.thetas))
