"""A small run on disk, identical to the bit each time: a checkpoint, and a log with every kind of record."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.wire import wire_format
from gem_server.core.commits import Arrived
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.core.values import EndReason, Header
from gem_server.durability import recovery, segment
from gem_server.durability.journal import Journal
from gem_server.durability.log_file import LogFile
from gem_server.durability.segment import Entry, Segment
from gem_server.durability.storage import Storage
from gem_server.durability.write_order import WriteOrder

LAYOUT = Layout.of({"w": (3, 5), "b": (2,)})
SETTINGS = Hyperparameters(batch_size=4, shard_size=8, epochs=2, shards="replicate")
SAMPLES, RUN, SEED, ALLOCATION = 40, "0a1b2c3d", 7, 4096


def new_core(run_id: str, settings: Hyperparameters) -> Core:
    """An empty core with a small memory limit."""
    numbers = count(1)
    return Core(run_id, settings, lease_seconds=60.0, memory_limit=1 << 20, new_id=lambda: f"lease-{next(numbers)}")


def write_run(directory: Path) -> None:
    """Writes the run."""
    core = new_core(RUN, SETTINGS)
    (directory / "log").mkdir(parents=True)
    order, file = WriteOrder[None](Journal(RUN)), LogFile(Storage(), directory / "log", new_seed=lambda: SEED)
    ann, bob = (core.register(name, LAYOUT, 0.0, overlap=name == "bob").lease_id for name in ("ann", "bob"))
    core.central.theta[:] = np.arange(LAYOUT.size)
    core.initialized()
    for lease in (ann, bob):
        core.pull(core.leases.get(lease))
        core.lease_shard(lease, SAMPLES, 0.0)
        commit(core, lease, "float32")
    captured = recovery.capture(core, order.journal)
    captured.copy_theta()
    recovery.save(directory, captured, keep=1)
    order.base_written()
    whole, segment._ALLOCATION = segment._ALLOCATION, ALLOCATION
    try:
        _go_on(core, ann, bob)
        for count in (2, 3, None):  # so that later records vouch for earlier ones
            group = order.ready()
            assert group is not None
            group = group._replace(records=group.records[:count])
            file.write(group)
            order.written(group)
            file.sync()
            order.acknowledge(group)
    finally:
        segment._ALLOCATION = whole
        file.close()


def _go_on(core: Core, ann: str, bob: str) -> None:
    core.plan_pull(core.leases.get(ann))()
    commit(core, ann, "float32", loss=float("nan"))
    commit(core, bob, "int8", loss=0.5)
    held = [shard for _, shard in core.ledger.held.values()]
    core.lease_shard(bob, SAMPLES, 0.0, [held[1].shard_id])
    core.complete_shard(ann, held[0].shard_id, 0.0)
    core.leave(ann, EndReason.EXPIRED)
    core.register("eve", LAYOUT, 0.0, owner="token:eve")


def commit(core: Core, lease_id: str, dtype: str, loss: float | None = None) -> None:
    """One commit of a lease, with the same gradient each time."""
    form = wire_format(dtype)
    lease = core.leases.get(lease_id)
    head = Header(lease_id, lease.sequence + 1, lease.base_version, LAYOUT.fingerprint, loss, 4)
    core.admit(head, 0.0)
    data = np.frombuffer(bytes(range(1, 1 + form.nbytes(LAYOUT.size))), np.uint8).copy() % 64
    upload = Upload(empty(LAYOUT.size))
    form.assembly(upload.gradient).add_all(data.data)
    step = core.begin(core.ticket(lease, head, 0.0, upload, Arrived(form.dtype, [data.data])))
    core.finish(step, step.run(), 0.0)


def entries(directory: Path) -> list[Entry]:
    """The records of the run's log."""
    return list(Segment(directory / "log" / segment.name(1)).entries())
