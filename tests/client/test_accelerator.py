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
from gem_client.run.commits import Commits
from gem_client.run.pending_commit import PendingCommit
from gem_client.torch import Optimizer
from gem_client.torch.parameters import require_apart
from kit.accelerator import TO_DEVICE, TO_HOST, WAITS, Accelerator
from kit.regions import abstract, linux_only
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
    settings: Hyperparameters,
    options: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    in_memory: bool = False,
) -> Iterator[tuple[Live, nn.Module, Optimizer]]:
    """A server, and the only worker of its run, with its model on the device."""
    model = network(1).to(device, dtype)
    given: Any = model.named_parameters()
    if settings.optimizer == "worker":
        given = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.5)
    socket: dict[str, Any] = {"memory_socket": abstract()} if in_memory else {}
    with serving(config(settings, **socket)) as live, connect(live.address) as session:
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


def trained(settings: Hyperparameters, options: dict[str, Any], device: torch.device = CPU, *, in_memory: bool = False) -> Any:
    """The run's θ after some steps of one worker: float32, shape (P,)."""
    with worker(settings, options, device, in_memory=in_memory) as (live, model, optimizer):
        assert optimizer.session.shares_memory == in_memory
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


@pytest.mark.parametrize("in_memory", [False, pytest.param(True, marks=linux_only)])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_on_an_accelerator_is_the_run_on_the_cpu(run: str, in_memory: bool, accelerator: Accelerator) -> None:
    """Although each copy comes as late as it may. One that comes too early brings NaNs."""
    late = trained(*RUNS[run], device=accelerator.device, in_memory=in_memory)
    np.testing.assert_array_equal(late, trained(*RUNS[run]))


@pytest.mark.parametrize("in_memory", [False, pytest.param(True, marks=linux_only)])
@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_no_copy_is_under_way_when_a_commit_begins(
    options: dict[str, Any], in_memory: bool, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes the next θ where the copy of the last one reads."""
    copying: list[bool] = []
    begin = Commits.prepare

    def prepare(*args: Any) -> PendingCommit:
        copying.append(accelerator.copying)
        return begin(*args)

    monkeypatch.setattr(Commits, "prepare", prepare)
    with worker(PLAIN, options, accelerator.device, in_memory=in_memory) as (_, model, optimizer):
        for step in range(3):
            optimizer.step(loss=compute(model, optimizer, step, accelerator.device))
            assert accelerator.copying is not bool(options)  # that of θ, unless it was waited for
        optimizer.finish()
        assert not accelerator.copying
    assert copying == [False] * 3


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
                assert accelerator.counts == ({TO_HOST: 1 + 1, TO_DEVICE: 1, WAITS: 1} if commits else {})


def test_a_grad_scaler_adds_its_own_wait_and_no_other(accelerator: Accelerator) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with worker(PLAIN, {}, accelerator.device) as (_, model, optimizer):
        for step in range(STEPS):
            loss = compute(model, optimizer, step, accelerator.device, scaler)
            accelerator.counts.clear()
            scaler.step(optimizer, loss=loss)
            scaler.update()
        assert accelerator.counts == {TO_HOST: 1 + 1, TO_DEVICE: 1, WAITS: 2}


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


def test_parameters_on_several_devices_are_trained_as_on_one(accelerator: Accelerator) -> None:
    """Some stay on the CPU: the flat tensors of a device hold only what follows each other in θ."""

    def run(devices: list[torch.device]) -> list[Tensor]:
        parameters = [nn.Parameter(torch.ones(3, 2).to(device)) for device in devices]
        with serving(config(PLAIN)) as live, connect(live.address) as session:
            optimizer = Optimizer(parameters, session)
            for step in range(3):
                for number, parameter in enumerate(parameters):
                    parameter.grad = torch.full((3, 2), number + step / 4).to(parameter.device)
                optimizer.step()
            return [parameter.detach().cpu() for parameter in parameters]

    mixed = run([CPU, accelerator.device, accelerator.device, CPU, accelerator.device])
    assert torch.equal(torch.cat(mixed), torch.cat(run([CPU] * 5)))


def test_a_model_may_move_to_an_accelerator_and_back_after_the_optimizer_was_made(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)  # tensors in Python can't be assigned

    def run(devices: list[torch.device]) -> Any:
        with worker(PLAIN, {}, CPU) as (live, model, optimizer):
            for step, device in enumerate(devices):
                model.to(device)
                loss = compute(model, optimizer, step, device)
                accelerator.counts.clear()
                optimizer.step(loss=loss)
                assert accelerator.counts[TO_HOST] == (0 if device == CPU else 1 + 1)
            return live.on_loop(lambda: live.core.central.theta.copy())

    np.testing.assert_array_equal(run([CPU, accelerator.device, accelerator.device, CPU]), run([CPU] * 4))


def test_a_device_without_room_for_the_flat_tensors_is_named(accelerator: Accelerator) -> None:
    accelerator.memory = 150
    advice = r"out of memory on standin:0: a worker keeps .* fewer workers"
    with pytest.raises(torch.OutOfMemoryError, match=advice), worker(PLAIN, {}, accelerator.device):
        pass


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
@pytest.mark.parametrize("in_memory", [False, pytest.param(True, marks=linux_only)])
def test_a_gpu_copies_from_and_to_the_arrays_of_the_session_themselves(in_memory: bool) -> None:
    with worker(PLAIN, {}, torch.device("cuda"), in_memory=in_memory) as (_, _, optimizer):
        session = optimizer.session
        for array in (session.gradient, session.theta):
            assert torch.from_numpy(array).is_pinned()
