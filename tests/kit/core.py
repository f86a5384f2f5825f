"""Helpers for tests of the core: deterministic lease ids, and one function for each action of a worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import SNAPSHOTS, Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import WHOLE, Range
from gem_api.rules import RULES
from gem_server.core.commits import Commit
from gem_server.core.records import Record
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.core.values import Admission, Applied, Header
from gem_server.durability import checkpoint, replay
from gem_server.durability.segment import from_text, to_text
from gem_server.durability.storage import Storage
from gem_server.durability.tensor_file import write_tensors

SMALL = Layout.of({"weight": (2, 3), "bias": (3,)})
ONES = np.ones(SMALL.size, np.float32)
SETTINGS = [
    *(Hyperparameters(rule=rule) for rule in RULES),
    *(Hyperparameters(snapshot=snapshot) for snapshot in SNAPSHOTS[1:]),
]
by_rule = pytest.mark.parametrize("hyperparameters", SETTINGS, ids=lambda h: f"{h.rule}-{h.snapshot}")


def make_core(
    settings: Hyperparameters | None = None,
    *,
    lease_seconds: float = 60.0,
    memory_limit: int = 0,
    first_id: int = 1,
    min_workers: int = 1,
    start_quiet_seconds: float = 0.0,
    logged: bool = False,
    stated: Collection[str] = (),
    part: Range = WHOLE,
) -> Core:
    """A core whose lease ids are lease-1, lease-2 …"""
    numbers = count(first_id)
    return Core(
        "run",
        settings or Hyperparameters(),
        lease_seconds=lease_seconds,
        memory_limit=memory_limit,
        min_workers=min_workers,
        start_quiet_seconds=start_quiet_seconds,
        logged=logged,
        stated=stated,
        part=part,
        new_id=lambda: f"lease-{next(numbers)}",
    )


def start(
    core: Core, workers: Sequence[str] = ("ann",), layout: Layout = SMALL, theta: Any = 0.0, now: float = 0.0
) -> list[str]:
    """Registers workers, gives θ its first value, and pulls for each worker. Returns their lease ids."""
    ids = [core.register(worker, layout, now).lease_id for worker in workers]
    core.require_initializer(ids[0], now)
    core.central.theta[:] = theta
    core.initialized()
    for lease_id in ids:
        core.pull(core.leases.get(lease_id))
    return ids


def header(core: Core, lease_id: str, sequence: int, base_version: int | None = None, **changes: Any) -> Header:
    """A commit's header; by default for a gradient computed on the θ that the worker last received."""
    lease = core.leases.live.get(lease_id)
    known = lease.base_version if lease else 0
    assert core.central.layout is not None
    fields: dict[str, Any] = {
        "fingerprint": core.central.layout.fingerprint, "loss": None, "samples": 1, "kind": core.rule.kind, **changes,
    }  # fmt: skip
    return Header(lease_id, sequence, known if base_version is None else base_version, **fields)


def send(core: Core, head: Header, gradient: Any, now: float = 0.0) -> Commit:
    """Sends a fresh commit's header and gradient; returns its ticket."""
    admission, lease = core.admit(head, now)
    assert admission is Admission.FRESH, admission
    return core.ticket(lease, head, now, uploaded(core, gradient))


def uploaded(core: Core, gradient: Any) -> Upload:
    """A gradient that has arrived: an array, or one number for all elements."""
    upload = Upload(np.empty(core.central.size, np.float32))
    upload.gradient[:] = gradient
    return upload


def apply(core: Core, ticketed: Commit, now: float = 0.0) -> Applied:
    """Applies a commit: begins, runs and finishes it."""
    step = core.begin(ticketed)
    return core.finish(step, step.run(), now)


def commit(core: Core, lease_id: str, sequence: int, gradient: Any, now: float = 0.0, **changes: Any) -> Applied:
    """One commit from header to result."""
    return apply(core, send(core, header(core, lease_id, sequence, **changes), gradient, now), now)


def bits(values: Any) -> bytes:
    """The bytes of an array, for comparisons bit by bit: −0 differs from 0, and a NaN equals itself."""
    return np.ascontiguousarray(values).tobytes()


def state(core: Core) -> tuple[Any, ...]:
    """Everything that a refused commit must leave alone."""
    leases = [
        (lease.lease_id, lease.sequence, lease.queued, lease.base_version, [bits(b) for b in lease.buffers.values()])
        for lease in core.leases.live.values()
    ]
    return bits(core.central.theta), core.central.version, core.next_ticket, core.steps_done, core.samples_committed, leases


def save_core(core: Core, directory: Path, keep: int = 3) -> Path:
    """Writes a checkpoint between two commits; returns its folder."""
    captured = checkpoint.capture(core)
    captured.copy_theta()
    return checkpoint.write(directory, captured, keep)


def recorded(core: Core) -> list[Record]:
    """The records of what happens to a core from now on, as they are read back from its log."""
    records: list[Record] = []

    def take(record: Record) -> int:
        payload = memoryview(b"".join(map(bytes, record.payload)))
        records.append(from_text(to_text(record), payload))
        record.written()
        return len(records)

    core.record_to(take)
    return records


def replay_all(core: Core, records: Sequence[Record]) -> None:
    for record in records:
        replay.apply(core, record, 0.0)


def restored(directory: Path, settings: Hyperparameters | None = None) -> Core:
    """The core that the newest whole checkpoint holds; none may be refused on the way."""

    def refuse(path: Path, why: str) -> None:
        raise AssertionError(f"{path} was refused: {why}")

    latest = checkpoint.newest(directory, refuse)
    assert latest is not None
    core = make_core(settings, first_id=100)
    checkpoint.restore(*latest, core, now=0.0)
    return core


def write_file(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Writes a file of tensors in a checkpoint's format."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return write_tensors(Storage().create(path), shapes, tensors.__getitem__, metadata or {})
