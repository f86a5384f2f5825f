"""Checkpoints: everything the core knows, in a folder that appears whole or not at all.

checkpoint-<version>-<serial>/
    model.safetensors    θ, by tensor name: what other tools load
    workers.safetensors  each lease's buffers, "<lease id>/<buffer>"; those that the run keeps once, "/<buffer>": the rule's
                         shared ones, and "/average", the average of θ
    state.json           the rest, size and SHA-256 of the two files, and its own SHA-256; "log": the first segment of the log
                         that tells what happened afterwards, or null; "last": whether it was written when the server stopped,
                         so that nothing happened afterwards; "range": [index, count], the part of the model that the server
                         holds; the two files have the pieces of that part
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Set
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gem_api import __version__
from gem_api.checkpoint import STATE, TENSORS, HigherFormat, digest, intact_state, name_of, version_and_serial
from gem_api.errors import GemError, Overloaded
from gem_api.formats import CHECKPOINT_FORMAT, MAX_STATE_BYTES, checkpoint_number, not_understood
from gem_api.framing import empty
from gem_api.layout import Vector
from gem_api.process.logs import Logger
from gem_api.process.regular_file import open_regular, read_regular
from safetensors import SafetensorError, safe_open

from gem_server.core.leases import SPARE
from gem_server.core.memory_budget import FLOAT_BYTES
from gem_server.core.state_machine import Core
from gem_server.durability.capture import Capture, state_buffers
from gem_server.durability.journal import LogPosition
from gem_server.durability.scratch import Scratch
from gem_server.durability.state import LeaseState, State, encoded, state_of
from gem_server.durability.storage import DISK, Storage, write_atomically
from gem_server.durability.tensor_file import write_tensors
from gem_server.rules.average import AVERAGE
from gem_server.rules.base import Buffers

_BAD = (
    FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
    SafetensorError, GemError,
)  # fmt: skip


class BadCheckpoint(Exception):
    """Not a complete checkpoint, or one that cannot be resumed; the message says why."""


class ForeignCheckpoint(BadCheckpoint):
    """A checkpoint that another release wrote and this one does not understand. It is not damaged: it keeps its name, and no
    older one takes its place."""


def list_checkpoints(directory: Path, storage: Storage = DISK) -> list[Path]:
    """The checkpoints in a directory, newest first."""
    entries = storage.glob(directory, "checkpoint-*")
    found = [(order, entry) for entry in entries if (order := version_and_serial(entry.name)) is not None]
    return [entry for _, entry in sorted(found, reverse=True)]


# -- writing


def capture(core: Core, log_position: LogPosition | None = None, scratch: Scratch | None = None) -> Capture:
    """Captures the core's state between two commits, with the position at which the log continues. The caller copies θ before
    the next commit, and closes what this returns, whatever happens: commits may wait for that. `scratch` is memory for the
    copies, usually prepared before."""
    return Capture(core, _state(core, log_position), scratch or Scratch(core.central.size))


def _state(core: Core, log_position: LogPosition | None) -> State:
    """The core's state. All of it is copied, or never changes: the core goes on while this is written. Answers become JSON only
    then, as that takes long."""
    layout = core.central.layout
    assert layout is not None
    assert core.central.initialized
    return State(
        format=CHECKPOINT_FORMAT,
        server_version=__version__,
        run_id=core.run_id,
        hyperparameters=core.settings,
        layout=[(tensor.name, list(tensor.shape)) for tensor in layout.tensors],
        groups=dict(layout.groups),
        version=core.central.version,
        progress=core.central.progress,
        rounds=core.rounds,
        next_ticket=core.next_ticket,
        outcomes=dict(core.outcomes),
        ended=dict(core.leases.ended),
        steps_done=dict(core.steps_done),
        samples_committed=core.samples_committed,
        norms=list(core.norms.norms),
        shared={name: float(value) for name, value in core.shared.numbers.items()},
        leases=[LeaseState.of(lease) for lease in core.leases.live.values()],
        ledger=core.ledger.state(),
        range=(core.part.index, core.part.count),
        log=log_position,
        last=False,
    )


def write(
    directory: Path,
    captured: Capture,
    keep: int,
    storage: Storage = DISK,
    logger: Logger | None = None,
) -> Path:
    """Writes a checkpoint atomically, then removes all but the newest `keep`; `logger` reports it if that fails.

    Raises:
        OSError: It could not be written; nothing of it is left, and the older ones are intact.
    """
    storage.make_directories(directory)
    _remove_left_over(directory, storage)
    path, scratch = _next_name(directory, captured.state.version, storage), directory / f".writing-{os.getpid()}"
    with write_atomically(storage, scratch, path):
        storage.make_directory(scratch)
        model = Tensors({name: tensor.shape for name, tensor in captured.model.items()}, captured.model.__getitem__)
        write_files(scratch, captured.state, model, Tensors(captured.shapes, captured.tensor), storage)
    _remove_old(directory, path, keep, storage, logger)
    return path


def make_room(directory: Path, keep: int, storage: Storage) -> bool:
    """Removes all but the newest `keep` checkpoints before another is written: a start that keeps fewer than the
    last one may find the disk full. Returns whether any was removed. What fails is left to the next `write`."""
    before = len(list_checkpoints(directory, storage))
    _remove_old(directory, None, keep + 1, storage, None)
    return len(list_checkpoints(directory, storage)) < before


def _next_name(directory: Path, version: int, storage: Storage) -> Path:
    """The folder of a version's next checkpoint."""
    existing = [version_and_serial(path.name) or (0, 0) for path in list_checkpoints(directory, storage)]
    serial = 1 + max((serial for other, serial in existing if other == version), default=0)
    return directory / name_of(version, serial)


def _remove_left_over(directory: Path, storage: Storage) -> None:
    """Removes what servers left behind that were killed while they wrote a checkpoint."""
    for scratch in storage.glob(directory, ".writing-*"):
        with suppress(OSError):
            storage.remove(scratch)


class Tensors(NamedTuple):
    """The tensors of one file.

    Attributes:
        shapes: Their shapes by name.
        tensor: Returns the tensor of a name, float32. Called once for each, in order.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tensor: Callable[[str], Vector]


def write_files(folder: Path, state: State, model: Tensors, workers: Tensors, storage: Storage) -> None:
    """Writes a checkpoint's files, each synced, to a new folder. `state.json` comes last: it holds the hashes of the others.
    Raises OSError."""
    metadata = {"format": "pt", "gem_version": str(state.version), "gem_run_id": state.run_id}
    files = {}
    for name, tensors, more in zip(TENSORS, (model, workers), (metadata, {}), strict=True):
        files[name] = write_tensors(storage.create(folder / name), tensors.shapes, tensors.tensor, more)
    values = {**vars(state), "files": files}
    values["sha256"] = digest(values, encoded)
    with closing(storage.create(folder / STATE)) as file:
        file.write(0, [json.dumps(values, indent=1, default=encoded).encode()])
        file.sync()
    storage.sync_directory(folder)


def _remove_old(directory: Path, newest: Path | None, keep: int, storage: Storage, logger: Logger | None) -> None:
    """Removes all but the newest `keep` checkpoints. The newest stands even if that fails; the next one tries again."""
    failed: list[OSError] = []
    try:
        old = [other for other in list_checkpoints(directory, storage) if other != newest][keep - 1 :]
    except OSError as error:
        old, failed = [], [error]
    for path in old:
        try:
            storage.remove(path)
        except OSError as error:
            failed.append(error)
    if failed and logger is not None:
        logger.warning(
            "can't remove an old checkpoint; the new one is written. Check the disk, and remove it by hand",
            folder=str(directory), why="; ".join(map(str, failed)),
        )  # fmt: skip


# -- reading


def newest(directory: Path, refuse: Callable[[Path, str], None]) -> tuple[Path, State] | None:
    """The newest complete checkpoint and its state, or None if the directory holds none.

    A damaged one is reported to `refuse` and renamed to "<name>.refused"; then the one before it is tried.

    Raises:
        ForeignCheckpoint: Another release wrote the newest one that is not damaged.
        BadCheckpoint: There are checkpoints, or were before they were refused, but none is complete: a server that is
            restarted repeatedly must not end up in a new run.
        OSError: One can't be read now, which says nothing about its content: it is left where it is.
    """
    candidates = list_checkpoints(directory)
    for path in candidates:
        try:
            return path, read_state(path)
        except ForeignCheckpoint:
            raise
        except BadCheckpoint as error:
            _set_aside(path)
            refuse(path, str(error))
    refused = list(directory.glob("checkpoint-*.refused*"))
    if refused:
        raise BadCheckpoint(
            f"none of the {len(refused)} checkpoints in {directory} is complete; they are kept as *.refused: put a backup "
            "there, or start a new run in another folder"
        )
    return None


def restore(path: Path, state: State, core: Core, now: float) -> None:
    """Restores a checkpoint into a new core made with its hyperparameters.

    Raises:
        ForeignCheckpoint: Its files are those that were written, but this release does not understand what they hold.
        BadCheckpoint: It holds another range of the model than the core, it is gone, or the machine has no memory for it.
    """
    if state.part != core.part:
        raise BadCheckpoint(
            f"{path} holds range {state.part} of the model, and this server was started with --range {core.part}: start it "
            f"with --range {state.part}, or cut the run anew with gem-ctl reshard"
        )
    try:
        layout = state.whole_layout.part(core.part)
        _require_written(path / TENSORS[0], layout.size)
        core.central.adopt(layout, empty(layout.size))
        _read_model(path / TENSORS[0], core)
        core.central.version, core.central.progress = state.version, state.progress
        core.rounds, core.next_ticket, core.samples_committed = state.rounds, state.next_ticket, state.samples_committed
        core.outcomes.update(state.outcomes)
        core.leases.ended.update(state.ended)
        core.steps_done.update(state.steps_done)
        core.norms.resume(state.norms)
        core.ledger.restore(state.ledger)
        with safe_open(path / TENSORS[1], framework="numpy") as tensors:
            core.shared.numbers.update(_numbers(core.rule.numbers, state.shared))
            names = (*core.rule.shared, *([AVERAGE] if core.central.decay else []))
            core.shared.buffers = _buffers("", names, tensors, layout.size)
            core.central.average = core.shared.buffers.pop(AVERAGE) if core.central.decay else None
            core.central.start()
            for lease in state.leases:
                _restore_lease(lease, tensors, core, now)
            buffers = (f"{owner.lease_id}/{name}" for owner in core.leases.live.values() for name in state_buffers(core, owner))
            _require_known(tensors, {*buffers, *(f"/{name}" for name in names)})
    except (FileNotFoundError, NotADirectoryError, Overloaded) as error:
        raise BadCheckpoint(f"{path}: {type(error).__name__}: {error}") from error
    except _BAD as error:
        why = f"{type(error).__name__}: {error}"
        raise ForeignCheckpoint(not_understood(path, why, state.server_version)) from error


def read_state(path: Path, files: bool = True) -> State:
    """Reads a checkpoint's state, in the form that this release writes, and with `files` checks its other files against it.
    The rule is not made, nor its module imported: a rule that is missing now does not make the checkpoint invalid. Raises
    BadCheckpoint."""
    try:
        values = intact_state(read_regular(path / STATE, MAX_STATE_BYTES), path)
        try:
            state = state_of(values, checkpoint_number(values))
        except (ValueError, GemError) as error:
            raise ForeignCheckpoint(not_understood(path, error, values.get("server_version"))) from error
        for name in TENSORS if files else ():
            _check_file(path / name, values["files"][name])
    except HigherFormat as error:
        raise ForeignCheckpoint(str(error)) from None
    except _BAD as error:
        raise BadCheckpoint(f"{path / STATE}: {type(error).__name__}: {error}") from error
    return state


def _set_aside(path: Path) -> None:
    names = (path.with_name(f"{path.name}.refused{suffix}") for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    path.rename(next(name for name in names if not name.exists()))


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise BadCheckpoint(
            f"{path}: it has {size} bytes, but {expected['bytes']} were written: it is truncated or was changed"
        )
    with open_regular(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise BadCheckpoint(f"{path}: it was changed after it was written (its SHA-256 differs)")


def _require_written(path: Path, parameters: int) -> None:
    """Raises ValueError if a file is too small for this number of parameters: memory is allocated for what is there, not for
    what is claimed."""
    if path.stat().st_size < FLOAT_BYTES * parameters:
        raise ValueError(f"{path} is too small for the {parameters} parameters of the layout")


def _read_model(path: Path, core: Core) -> None:
    layout = core.central.layout
    assert layout is not None
    views = layout.split(core.central.theta)
    with safe_open(path, framework="numpy") as tensors:
        for name, view in views.items():
            tensor = tensors.get_tensor(name)
            if tensor.shape != view.shape:  # NumPy would repeat a smaller one
                raise ValueError(f"tensor {name!r} has shape {tensor.shape}, the layout says {view.shape}")
            np.copyto(view, tensor, casting="no")
        _require_known(tensors, views.keys())


def _require_known(tensors: Any, names: Set[str]) -> None:
    """Raises ValueError if a file has another tensor than these: what this release does not know, it would lose."""
    if unknown := set(tensors.keys()) - names:
        raise ValueError(f"there is an unknown tensor, {min(unknown)[:50]!r}")


def _restore_lease(state: LeaseState, tensors: Any, core: Core, now: float) -> None:
    names = core.rule.buffers if state.spare_version is None else (*core.rule.buffers, SPARE)
    buffers = _buffers(state.lease_id, names, tensors, core.central.size)
    core.leases.add(state.lease(now + core.leases.duration, buffers))


def _numbers(initial: Mapping[str, float], kept: dict[str, float]) -> dict[str, float]:
    """The numbers that the rule shares between workers. One that an earlier release did not have keeps its initial value.
    Raises ValueError if one is not finite, or the rule has no such number."""
    if unknown := kept.keys() - initial.keys():
        raise ValueError(f"state.shared has an unknown name, {min(unknown)[:50]!r}")
    numbers = {name: float(kept.get(name, value)) for name, value in initial.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"the rule's numbers must be finite: {numbers}")
    return numbers


def _buffers(owner: str, names: tuple[str, ...], tensors: Any, size: int) -> Buffers:
    """A lease's buffers, or the shared ones: float32, shape (size,). Raises ValueError if one has another shape or dtype."""
    buffers = {name: tensors.get_tensor(f"{owner}/{name}") for name in names}
    if any(buffer.shape != (size,) or buffer.dtype != np.float32 for buffer in buffers.values()):
        raise ValueError(f"the buffers of {owner or 'all workers'} have another shape than the model")
    return buffers
