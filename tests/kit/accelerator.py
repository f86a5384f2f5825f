"""An accelerator in Python, for tests of what a GPU does: copies from and to it are queued, and carried out late.

A test takes the fixture `accelerator`, moves a model or a batch to `accelerator.device`, and looks at `accelerator.counts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
TO_HOST, TO_DEVICE, WAITS = "copies to the host", "copies to the device", "waits"


class Queued(NamedTuple):
    """A copy that was not carried out yet, and its number among all that the device was given to do."""

    number: int
    way: str
    carry_out: Callable[[], object]


@dataclass
class Accelerator:
    """PyTorch's accelerator, with one stream. Tensors on `device` keep their values on the host. It has no page-locked memory.

    A queued copy is carried out as late as it may be on a GPU: one to the host when somebody waits for it; one to the device
    when the device next computes, or somebody waits.

    Attributes:
        device: What `tensor.to(...)` takes.
        counts: How many copies were made each way, and how often the host had to wait: for a copy that is not only queued, a
            number, or an event that has not occurred.
    """

    device: torch.device = field(default_factory=lambda: torch.device(NAME, 0))
    counts: Counter[str] = field(default_factory=Counter)
    _given: int = 0
    _done: int = 0
    _queue: list[Queued] = field(default_factory=list)
    _lock: RLock = field(default_factory=RLock)

    @property
    def busy(self) -> bool:
        """Whether the device was given something to do that nobody has waited for."""
        return self._given > self._done

    def copy(self, into: Tensor, source: Tensor, only_queued: bool) -> None:
        """Copies a tensor from the host to the device, or from there."""
        way, value, target = TO_HOST if isinstance(source, OnDevice) else TO_DEVICE, raw(source).detach(), raw(into).detach()
        if way == TO_HOST:
            value = value.clone()  # what the device computes later comes after the copy
        with self._lock:
            self._given += 1
            self.counts[way] += 1
            self._queue.append(Queued(self._given, way, lambda: target.copy_(value)))
        if not only_queued or into.dtype != source.dtype:  # a conversion by the host
            self.wait()

    def compute(self) -> None:
        """The device is given an operation, which sees the copies to the device before it."""
        with self._lock:
            self._given += 1
            self._carry_out([each for each in self._queue if each.way == TO_DEVICE])

    def wait(self, number: int | None = None) -> None:
        """Waits for everything up to that number; None: for all."""
        with self._lock:
            number = self._given if number is None else number
            if number > self._done:
                self.counts[WAITS] += 1
                self._done = number
                self._carry_out([each for each in self._queue if each.number <= number])

    def record_event(self) -> Event:
        return Event(self, self._given)

    def _carry_out(self, copies: list[Queued]) -> None:
        self._queue = [each for each in self._queue if each not in copies]
        for copy in copies:
            copy.carry_out()


@dataclass
class Event:
    """Occurs when all that the accelerator had been given is done."""

    accelerator: Accelerator
    number: int

    def synchronize(self) -> None:
        self.accelerator.wait(self.number)


class OnDevice(Tensor):
    """A tensor on the accelerator; `raw` holds its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        shape = values.size(), values.stride(), values.storage_offset()
        made: OnDevice = Tensor._make_wrapper_subclass(cls, *shape, dtype=values.dtype, device=torch.device(NAME, 0))
        made.raw = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name, accelerator = dict(kwargs or {}), func.overloadpacket.__name__, _plugged_in[-1]
        if name == "copy_" and isinstance(args[0], cls) != isinstance(args[1], cls):
            accelerator.copy(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
            return args[0]
        leaves = kwargs.pop("device", None) == torch.device("cpu")
        accelerator.compute()
        same = {id(each.raw): each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls)}
        out = func(*pytree.tree_map(raw, args), **pytree.tree_map(raw, kwargs))
        if leaves or isinstance(out, (bool, int, float)):
            accelerator.counts[TO_HOST] += leaves
            accelerator.wait()
            return out
        return pytree.tree_map_only(Tensor, lambda made: same[id(made)] if id(made) in same else cls(made), out)


def raw(value: Any) -> Any:
    """The values of a tensor on the device; anything else as it is."""
    return value.raw if isinstance(value, OnDevice) else value


_plugged_in: list[Accelerator] = []


class _Module:
    """What PyTorch asks about the accelerator. There is none but in a test that has plugged one in."""

    def device_count(self) -> int:
        return len(_plugged_in)

    def is_available(self) -> bool:
        return bool(_plugged_in)

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


@cache
def _registered() -> torch.library.Library:
    """Makes the accelerator known to PyTorch, which never forgets it, and gives it the operations that no tensor of it has."""
    _setup_privateuseone_for_python_backend(NAME, _Module())

    def empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return OnDevice(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library


def plugged_in(patch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """The body of the fixture `accelerator`. A real one would be hidden from later tests, so that this one is skipped."""
    if torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available():
        pytest.skip("this machine has an accelerator")
    _registered()
    accelerator = Accelerator()
    patch.setattr(torch.accelerator, "current_stream", lambda device: accelerator)
    _plugged_in.append(accelerator)
    with torch.autograd.set_multithreading_enabled(False):  # autograd has made its threads, one for each device, before
        yield accelerator
    _plugged_in.remove(accelerator)
