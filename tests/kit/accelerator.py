"""An accelerator in Python, for tests of what a GPU does: copies from and to it are queued, and carried out late.

A test takes the fixture `accelerator`, moves a model or a batch to `accelerator.device`, and looks at `accelerator.counts`.
"""

from __future__ import annotations

from collections import Counter, deque
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


class Event(NamedTuple):
    """Occurs when a stream has done all that it had been given."""

    stream: Stream
    number: int

    def synchronize(self) -> None:
        self.stream.wait(self.number)


class Stream:
    """What the device was given to do, in order. It does each thing as late as a GPU may: a copy when what comes after it is
    computed, and what it brings to the host is there once somebody has waited for it.

    A copy that is not ordered after the work of the device's own stream may come too early on a GPU: it brings NaNs here.

    Attributes:
        given: How many things it was given.
        done: How many of them the host has waited for.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._work: deque[tuple[int, Callable[[], object]]] = deque()
        self._landing: list[tuple[int, Callable[[], object]]] = []
        self._awaited: list[tuple[int, Event]] = []
        self._copies: list[int] = []
        self.given = self.done = 0
        accelerator.streams.append(self)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copies a tensor from the host to the device, or from there."""
        early = self is not self._accelerator.own and not self._comes_after(self._accelerator.own)
        way, value, target = TO_HOST if isinstance(source, OnDevice) else TO_DEVICE, raw(source).detach(), raw(into).detach()
        self._accelerator.counts[way] += 1
        self._accelerator.copied.append(value.nbytes)
        number = self.given + 1
        self._copies.append(number)

        def carry_out() -> None:
            read = torch.full_like(value, torch.nan if value.is_floating_point() else 1) if early else value.clone()
            if way == TO_HOST:
                self._landing.append((number, lambda: target.copy_(read)))
            else:
                target.copy_(read)

        self._give(carry_out)

    @property
    def copying(self) -> bool:
        """Whether a copy may not have ended, because the host has not waited for it."""
        return bool(self._copies)

    def compute(self) -> None:
        """The device is given an operation, which sees what was given before it."""
        with self._accelerator.lock:
            error, self._accelerator.error = self._accelerator.error, None
            if error is not None:
                raise error
            self._give(lambda: None)
            self._advance(self.given)

    def record_event(self) -> Event:
        return Event(self, self.given)

    def wait_event(self, event: Event) -> None:
        """What is given from now on comes after the event."""
        self._give(lambda: event.stream._advance(event.number))
        self._awaited.append((self.given, event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait(self, number: int) -> None:
        """The host waits for everything up to that number."""
        with self._accelerator.lock:
            if number > self.done:
                self._accelerator.counts[WAITS] += 1
                self._finish(number)

    def _give(self, work: Callable[[], object]) -> None:
        with self._accelerator.lock:
            self.given += 1
            self._work.append((self.given, work))

    def _comes_after(self, other: Stream) -> bool:
        """Whether what is given now comes after all that the other stream was given."""
        waited = any(event.stream is other and event.number == other.given for _, event in self._awaited)
        return waited or other.given == other.done

    def _advance(self, number: int) -> None:
        while self._work and self._work[0][0] <= number:
            self._work.popleft()[1]()

    def _finish(self, number: int) -> None:
        self._advance(number)
        self.done = max(self.done, number)
        self._copies = [copy for copy in self._copies if copy > self.done]
        for _, event in [each for each in self._awaited if each[0] <= number]:
            event.stream._finish(event.number)
        self._awaited = [each for each in self._awaited if each[0] > number]
        landed = [each for each in self._landing if each[0] <= number]
        self._landing = [each for each in self._landing if each[0] > number]
        for _, land in landed:
            land()


@dataclass
class Accelerator:
    """PyTorch's accelerator. Tensors on `device` keep their values on the host. It has no page-locked memory.

    Attributes:
        device: What `tensor.to(...)` takes.
        counts: How many copies were made each way, and how often the host had to wait: for a copy that is not only queued, a
            number, or an event that has not occurred.
        memory: Bytes that the largest tensor may have.
        copied: The bytes of each copy.
        error: What the next operation raises, once, as CUDA's does if a call before it has failed.
        own: The stream that it begins with.
        current: The stream that gets what it is given.
    """

    device: torch.device = field(default_factory=lambda: torch.device(NAME, 0))
    counts: Counter[str] = field(default_factory=Counter)
    memory: int = 1 << 40
    copied: list[int] = field(default_factory=list)
    error: Exception | None = None
    lock: RLock = field(default_factory=RLock)
    streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = self.current = Stream(self)

    @property
    def busy(self) -> bool:
        """Whether the device was given something to do that nobody has waited for."""
        return any(stream.given > stream.done for stream in self.streams)

    @property
    def copying(self) -> bool:
        """Whether a copy may not have ended, because the host has not waited for it."""
        return any(stream.copying for stream in self.streams)

    def copy(self, into: Tensor, source: Tensor, only_queued: bool) -> None:
        """Copies a tensor from the host to the device, or from there."""
        with self.lock:
            self.current.copy(into, source)
        if not only_queued or into.dtype != source.dtype:  # a conversion by the host
            self.wait()

    def wait(self) -> None:
        """The host waits for all that the current stream was given."""
        self.current.wait(self.current.given)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def require_room(self, made: Tensor) -> Tensor:
        """Raises an error, as GPUs do, if a tensor has too many bytes."""
        if made.nbytes > self.memory:
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {made.nbytes} bytes.")
        return made


class OnDevice(Tensor):
    """A tensor on the accelerator; `raw` holds its values."""

    raw: Tensor

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

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
        accelerator.current.compute()
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
        return OnDevice(_plugged_in[-1].require_room(torch.empty(size, dtype=dtype)))

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
    patch.setattr(torch.accelerator, "current_stream", lambda device: accelerator.current)
    patch.setattr(torch.accelerator, "set_stream", accelerator.set_stream)
    patch.setattr(torch, "Stream", lambda device: Stream(accelerator))
    _plugged_in.append(accelerator)
    with torch.autograd.set_multithreading_enabled(False):  # autograd has made its threads, one for each device, before
        yield accelerator
    _plugged_in.remove(accelerator)
