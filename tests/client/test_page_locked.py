"""The session's memory is page-locked while a device copies from and to it. CUDA's runtime is a stand-in."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from client.torch_helpers import network
from gem_api.framing import empty_pages
from gem_api.hyperparameters import Hyperparameters
from gem_client import Session, connect
from gem_client.run.host_buffers import HostBuffers
from gem_client.torch import Optimizer, page_locked
from gem_client.torch.page_locked import PageLocks
from gem_client.torch.session_tensors import OnDevices
from kit.accelerator import Accelerator, raw
from kit.model import expire_all
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving
from torch import Tensor, nn

PLAIN = Hyperparameters(rule="downpour", learning_rate=0.1)
in_memory_or_not = pytest.mark.parametrize("in_memory", [False, True])
pytestmark = linux_only


class Runtime:
    """CUDA's functions that lock memory and unlock it. Like CUDA, it refuses pages that are locked already.

    Args:
        accelerator: Its next operation raises an error if locking has failed.
        refuses: The error of each call to lock; 0: none.

    Attributes:
        locked: The number of bytes by the address, of all that is locked.
        total: How many locks there were.
        attempts: How many calls to lock there were.
    """

    def __init__(self, accelerator: Accelerator, refuses: int = 0) -> None:
        self._accelerator, self._refuses = accelerator, refuses
        self.locked: dict[int, int] = {}
        self.total = self.attempts = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.attempts += 1
        assert mapping_of(address).endswith("s"), "a fork would copy it"
        pages = {page for begin, size in self.locked.items() for page in _pages(begin, size)}
        code = self._refuses or 712 * bool(pages & set(_pages(address, nbytes)))
        if code:
            self._accelerator.error = RuntimeError("CUDA error: of a call before")
            return code
        self.locked[address] = nbytes
        self.total += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert mapping_of(address), "unlocked after it was unmapped"
        del self.locked[address]
        return 0


def _pages(address: int, nbytes: int) -> range:
    return range(address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE + 1)


def mapping_of(address: int) -> str:
    """The permissions of the memory at this address, which end with an s if a fork shares it; empty if it is not mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            return permissions
    return ""


@pytest.fixture
def runtime(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(accelerator)
    monkeypatch.setattr(page_locked, "runtime", lambda device: made)
    return made


@contextmanager
def training(accelerator: Accelerator, in_memory: bool) -> Iterator[tuple[Live, Session, Callable[[], Optimizer]]]:
    """A server, a session, and what makes a step of the only worker: it returns the optimizer."""
    model = network(1).to(accelerator.device)
    socket: dict[str, Any] = {"memory_socket": abstract()} if in_memory else {}
    with serving(config(PLAIN, **socket)) as live, connect(live.address) as session:
        made = [Optimizer(model.named_parameters(), session)]

        def step() -> Optimizer:
            made[0].zero_grad()
            inputs = torch.ones(2, 4).to(accelerator.device)
            nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True)).backward()
            made[0].step()
            return made[0]

        yield live, session, step
        made.clear()


def addresses(session: Session) -> set[int]:
    return {session.gradient.ctypes.data, session.theta.ctypes.data}


@in_memory_or_not
def test_the_arrays_of_the_session_are_locked_once_and_unlocked_when_it_ends(
    in_memory: bool, accelerator: Accelerator, runtime: Runtime
) -> None:
    with training(accelerator, in_memory) as (_, session, step):
        for _ in range(3):
            step()
        assert addresses(session) < runtime.locked.keys()
        assert runtime.total == 3  # with that of the loss
        session.close()
        assert not runtime.locked


@in_memory_or_not
def test_a_new_lease_has_its_own_arrays_locked_and_the_old_ones_unlocked(
    in_memory: bool, accelerator: Accelerator, runtime: Runtime
) -> None:
    with training(accelerator, in_memory) as (live, session, step):
        step()
        before = addresses(session)
        expire_all(live)
        answer = step().answer
        assert answer is not None
        assert answer.lost
        step()
        assert addresses(session) < runtime.locked.keys()
        assert len(runtime.locked) == 3
        if in_memory:
            assert not before & runtime.locked.keys()
    assert not runtime.locked


def test_an_optimizer_that_is_gone_leaves_nothing_locked(accelerator: Accelerator, runtime: Runtime) -> None:
    model = network(1).to(accelerator.device)
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        optimizer = Optimizer(model.named_parameters(), session)
        assert runtime.locked
        del optimizer
        gc.collect()
        assert not runtime.locked


def trained(accelerator: Accelerator) -> list[Tensor]:
    """The parameters after the commits of two leases, each with its own region."""
    with training(accelerator, in_memory=True) as (live, _, step):
        for _ in range(3):
            step()
        expire_all(live)
        for _ in range(3):
            optimizer = step()
        return [parameter.detach().cpu() for parameter in optimizer.trained.values()]


def test_if_cuda_can_not_lock_them_page_locked_buffers_take_their_place_and_the_log_says_so_once(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the error for the next operation, which is not to blame."""
    expected, refusing, buffers = trained(accelerator), Runtime(accelerator, refuses=801), list[Tensor]()

    def buffer(tensor: Tensor) -> Tensor:
        buffers.append(torch.full_like(tensor, torch.nan))
        return buffers[-1]

    monkeypatch.setattr(page_locked, "runtime", lambda device: refusing)
    monkeypatch.setattr(page_locked, "page_locked_like", buffer)
    caplog.clear()
    for one, other in zip(trained(accelerator), expected, strict=True):
        assert torch.equal(one, other)
    assert (refusing.attempts, len(buffers)) == (1, 2 * 3)
    warned = [record.message.partition(":0 ")[2] for record in caplog.records if "page-lock" in record.message]
    assert [line.partition(":")[0] for line in warned] == ["can't page-lock this worker's memory (CUDA error 801)"]


def test_without_page_locked_memory_copies_go_on_and_the_log_says_so(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch has none for the accelerator in Python."""
    trained(accelerator)
    lines = [record.message.partition(": ")[0] for record in caplog.records if "page-lock" in record.message]
    assert lines == ["no page-locked memory, so copies from and to standin:0 take longer"]


def test_the_buffer_of_theta_is_not_overwritten_while_it_is_read(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked, "page_locked_like", torch.empty_like)
    host: Any = SimpleNamespace(gradient=np.zeros(2, np.float32), theta=np.ones(2, np.float32), at_end=lambda work: None)
    on_device = OnDevices(host, [torch.zeros(2).to(accelerator.device)])
    on_device.bind()
    on_device.load()
    host.theta[:] = 2
    on_device.load()
    assert [raw(each).tolist() for each in on_device.buffers.thetas] == [[1, 1]]


def test_the_sessions_buffers_are_not_moved_while_a_commit_is_under_way() -> None:
    lock, held = threading.Lock(), list[bool]()
    HostBuffers(MagicMock(move_into_pages=lambda: held.append(lock.locked())), lock).move_into_pages()
    assert held == [True]


def test_memory_is_unlocked_after_the_last_copy_and_not_by_a_forked_process(
    accelerator: Accelerator, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    locks = PageLocks(accelerator.device, lambda: locked.append(len(runtime.locked)))
    kept = [locks.lock(empty_pages(3)), locks.lock(empty_pages(3))]
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        del kept[0]
    assert (locked, len(runtime.locked)) == ([], 2)
    locks.release()
    assert (locked, len(runtime.locked)) == ([2], 1)
