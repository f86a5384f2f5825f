"""Arrays on the host that an accelerator copies from and to by itself, while the host goes on."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

log = logging.getLogger("gem_client")
Array = npt.NDArray[Any]


class HostArray:
    """An array on the host, as a device copies from and to it.

    Args:
        array: The array, of one dimension.
        tensor: A tensor over it, or a page-locked one beside it if the array itself can't be page-locked.

    Attributes:
        tensor: What the device copies from and to.
        beside: Whether that is another memory than the array's.
    """

    def __init__(self, array: Array, tensor: Tensor) -> None:
        self._array, self.tensor = array, tensor
        self.beside = tensor.data_ptr() != array.ctypes.data

    def put(self) -> None:
        """Has the tensor hold what the array holds."""
        if self.beside:
            np.copyto(self.tensor.numpy(), self._array)

    def take(self) -> None:
        """Has the array hold what the tensor holds."""
        if self.beside:
            np.copyto(self._array, self.tensor.numpy())


class PageLocks:
    """Page-locks arrays of the host for a device, each until `release`.

    CUDA locks them where they are, a region of shared memory too, so that no copy is made on the host. If it can't (WSL2,
    gVisor), and for other accelerators, the device copies from and to page-locked buffers of PyTorch's beside them. Apple's
    GPUs share the host's memory, and need neither. The log says what could not be locked, once.

    Args:
        device: The device.
        wait: Waits until the device copies from and to none of the arrays any more.
    """

    def __init__(self, device: torch.device, wait: Callable[[], object]) -> None:
        self._device, self._wait = device, wait
        self._runtime = runtime(device)
        self._buffers = device.type != "mps"
        self._locked: list[weakref.finalize[Any, HostArray]] = []

    def lock(self, array: Array) -> HostArray:
        """The array for the device."""
        if self._runtime is not None and array.size:
            if self._registers(array):
                return self._until_released(HostArray(array, torch.from_numpy(array)), array)
            self._runtime = None
        if self._buffers:
            try:
                return HostArray(array, page_locked_like(torch.from_numpy(array)))
            except RuntimeError as error:  # there is not enough of it, or the accelerator has none
                self._buffers = False
                log.warning("no page-locked memory, so copies from and to %s take longer: %s", self._device, _line(error))
        return HostArray(array, torch.from_numpy(array))

    @property
    def in_place(self) -> bool:
        """Whether arrays are locked where they are. They must have pages of their own, which no fork copies: a page that the
        process then writes to is another one than the device knows."""
        return self._runtime is not None

    def release(self) -> None:
        """Unlocks all arrays, so that they may be unmapped."""
        for unlock in self._locked:
            unlock()
        self._locked.clear()

    def _registers(self, array: Array) -> bool:
        try:
            code = int(self._runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
        except RuntimeError as error:
            why = _line(error)
        else:
            if not code:
                return True
            why = f"CUDA error {code}"
            # CUDA keeps the error, and PyTorch would raise it at its next operation: this one takes it.
            with suppress(RuntimeError):
                torch.ones(1, device=self._device)
        log.warning(
            "%s can't page-lock this worker's memory (%s): its commits take two more copies on the host", self._device, why
        )
        return False

    def _until_released(self, made: HostArray, array: Array) -> HostArray:
        """Unlocks the array with `release`, or with the last reference to what was made. It stays mapped until then."""
        unlock = weakref.finalize(made, _unlock, self._runtime, array, self._wait, os.getpid())
        unlock.atexit = False  # the end of the process unlocks it
        self._locked.append(unlock)
        return made


def runtime(device: torch.device) -> Any:
    """CUDA's runtime (or ROCm's, under the same names), which page-locks memory; None for other devices."""
    return torch.cuda.cudart() if device.type == "cuda" else None


def page_locked_like(tensor: Tensor) -> Tensor:
    """A page-locked tensor of PyTorch's. Raises RuntimeError if there is none."""
    return torch.empty_like(tensor, pin_memory=True)


def _unlock(runtime: Any, array: Array, wait: Callable[[], object], process: int) -> None:
    if os.getpid() == process:  # a forked one has the locks no more
        wait()
        runtime.cudaHostUnregister(array.ctypes.data)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
