"""Whatever the server accepts, its log and its checkpoints can hold and read back, and its status can show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gem_api.checkpoint import TENSORS
from gem_api.errors import GemError
from gem_api.hyperparameters import SHARD_MODES, Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import WHOLE, Range
from gem_api.v1 import training_pb2 as pb
from gem_server.core.records import Record
from gem_server.core.values import Admission
from gem_server.durability import checkpoint
from gem_server.durability.segment import from_text, to_text
from gem_server.durability.state import encoded, state_of
from gem_server.intake import messages
from gem_server.telemetry.progress import Progress
from gem_server.telemetry.run_view import RunView
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from kit.core import apply, make_core, uploaded

WHOLE_NUMBERS = st.sampled_from([0, 1, 2, *(2**k + d for k in (31, 32, 40, 53, 63) for d in (-1, 0, 1)), 2**64 - 1])
REALS = st.sampled_from([-0.0, 1.5, -1e308, math.nan, math.inf, -math.inf])
PARTS = (WHOLE, Range(0, 2), Range(1, 2))
SETTINGS = [Hyperparameters(shards=shards, shard_size=1, rule="downpour") for shards in SHARD_MODES]
RUN, MODEL = "run-0001", {"w": (20_000,)}


class Server:
    """A core driven by messages, with the records of all that it accepted."""

    def __init__(self, settings: Hyperparameters, part: Range) -> None:
        self.records: list[Record] = []
        self.core = make_core(settings, part=part, logged=True)
        self.core.record_to(self._take)
        self.leases: list[str] = []
        self.samples = 10

    def _take(self, record: Record) -> int:
        self.records.append(record)
        return len(self.records)

    def register(self, worker: str, run: str, extra: Mapping[str, tuple[int, ...]]) -> None:
        hyperparameters = self.core.settings.to_message()
        leader = pb.LeadsAnswer(lease_id=f"{len(self.leases):032x}", run_id=run, hyperparameters=hyperparameters)
        shown = None if self.core.part.leads else messages.leader_registration(leader)
        self.leases.append(self.core.register(worker, Layout.of({**MODEL, **extra}), 0.0, leader=shown).lease_id)

    def begin(self) -> None:
        self.core.initialized()
        for lease_id in self.leases:
            self.core.pull(self.core.leases.get(lease_id))

    def commit(self, worker: int, odd: Mapping[str, Any]) -> None:
        assert self.core.central.layout is not None
        lease = self.core.leases.get(self.leases[worker])
        fields: dict[str, Any] = {"sequence": lease.sequence + 1, "base_version": lease.base_version, "sample_count": 1, **odd}
        fingerprint = self.core.central.layout.fingerprint
        header = messages.header(pb.CommitHeader(lease_id=lease.lease_id, layout_fingerprint=fingerprint, **fields))
        if self.core.admit(header, 0.0)[0] is Admission.FRESH:
            apply(self.core, self.core.ticket(lease, header, 0.0, uploaded(self.core, 1.0)))

    def shard(self, worker: int, done: int) -> None:
        self.core.lease_shard(self.leases[worker], self.samples, 0.0)
        self.core.complete_shard(self.leases[worker], done, 0.0)


def require_readable(server: Server) -> None:
    """Fails unless the log, a checkpoint and the status can hold what the server has accepted."""
    core = server.core
    for record in server.records:
        again = from_text(to_text(record), memoryview(b""))
        assert (again.kind, json.dumps(again.fields)) == (record.kind, json.dumps(record.fields))
    assert len(core.run_id.encode()) <= 8, "a segment's header has room for 8 characters"
    if core.central.initialized:
        sums = {name: {"bytes": 0, "sha256": ""} for name in TENSORS}
        whole = {**vars(checkpoint.capture(core).state), "files": sums, "sha256": ""}
        state_of(json.loads(json.dumps(whole, default=encoded)))
        assert core.central.layout is not None
        assert len(core.central.layout.split(core.central.theta)) == len(core.central.layout.pieces), "two pieces share a name"
    RunView(core, Progress(0.0), lambda: 0.0).read().SerializeToString()


@given(
    st.sampled_from(PARTS),
    st.sampled_from(SETTINGS),
    st.text(max_size=12),
    st.sampled_from([RUN, "x" * 9, "x" * 64, ""]),
    st.sampled_from(["v", "w[0:8192]", "w[8192:20000]"]),
)
@example(PARTS[2], SETTINGS[0], "ann", RUN, "w[8192:20000]")  # rare by chance
def test_a_registration_can_be_read_back(part: Range, settings: Hyperparameters, worker: str, run: str, tensor: str) -> None:
    server = Server(settings, part)
    with suppress(GemError):
        server.register(worker, run, {tensor: (64,)})
        server.begin()
    require_readable(server)


COMMITS = st.one_of(
    st.dictionaries(st.sampled_from(["sequence", "base_version", "sample_count"]), WHOLE_NUMBERS, max_size=1),
    st.fixed_dictionaries({"loss": REALS}),
)
CALLS = st.one_of(
    st.tuples(st.just("commit"), st.integers(0, 1), COMMITS),
    st.tuples(st.just("shard"), st.integers(0, 1), WHOLE_NUMBERS),
)


@examples(max_examples=50)
@given(st.sampled_from(PARTS), st.sampled_from(SETTINGS), WHOLE_NUMBERS, st.lists(CALLS, max_size=6))
def test_a_call_can_be_read_back(part: Range, settings: Hyperparameters, samples: int, calls: list[tuple[Any, ...]]) -> None:
    server = Server(settings, part)
    server.samples = samples
    for worker in ("ann", "bob"):
        server.register(worker, RUN, {})
    server.begin()
    for name, *arguments in calls:
        with suppress(GemError):
            getattr(server, name)(*arguments)
    require_readable(server)
