"""The simulation finds bugs: each of these is planted on purpose, and found within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gem_server import apply_loop
from gem_server.core import state_machine
from gem_server.core.commits import Commit, Step
from gem_server.core.leases import Lease
from gem_server.core.records import Kind, Record
from gem_server.core.shards import ShardLedger
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.core.values import Applied
from gem_server.durability import checkpoint, replay, segment
from gem_server.durability.capture import Capture
from gem_server.durability.checkpoint import BadCheckpoint
from gem_server.durability.journal import Journal, LogPosition
from gem_server.durability.segment import DamagedLog, SegmentWriter
from gem_server.durability.state import LeaseState, State
from gem_server.durability.storage import Storage
from gem_server.durability.write_order import Group, WriteOrder
from gem_server.intake.uploads import Uploads
from gem_server.rules import PiStatistics, RuleInput
from simulation import bugs_of_held_replies, bugs_of_several_servers  # noqa: F401  it adds its bugs to the table
from simulation.disk import SimulatedDisk
from simulation.machine import Machine
from simulation.planting import BUGS, Plant, planted
from simulation.server import Plan, Release
from simulation.world import World, small

SEVERAL_STEPS, STEPS = 6000, 1000
SEVERAL_SEEDS, SEEDS = 40, 400

# -- in a server


@planted(servers=1, seed=1)
def replies_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    """What is appended counts as safe."""
    patch.setattr(WriteOrder, "awaits", lambda order, number: False)


@planted(servers=1, seed=1)
def skips_the_sync_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentWriter, "sync", lambda writer: None)


@planted(servers=1)
def skips_the_sync_of_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDisk, "sync_directory", lambda disk, path: None)


@planted(servers=1, seed=1)
def takes_more_for_synced_than_was(patch: pytest.MonkeyPatch) -> None:
    """A sync is taken to cover what was written after it had begun, and what was not written at all."""
    acknowledge = WriteOrder.acknowledge

    def more(order: WriteOrder[Any], group: Group) -> list[Any]:
        released = acknowledge(order, group)
        order.journal.durable = order.journal.appended
        return released + order._released()

    patch.setattr(WriteOrder, "acknowledge", more)


@planted(servers=1, seed=1)
def checks_no_sums(patch: pytest.MonkeyPatch) -> None:
    """A torn record is taken for a whole one."""
    patch.setattr(segment, "crc32c", lambda data, value=0: 0)


@planted(servers=1, seed=2)
def opens_a_segment_before_the_last_is_synced(patch: pytest.MonkeyPatch) -> None:
    """A crash may then leave a segment without the end of the one before it."""
    patch.setattr(WriteOrder, "_begins_segment", lambda order, records: False)


@planted(servers=1)
def cuts_without_a_new_segment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "cut", lambda journal: LogPosition(journal.serial, journal.appended))


@planted(servers=1)
def cuts_one_record_late(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint says that it holds one record more than it does."""
    cut = Journal.cut

    def late(journal: Journal) -> LogPosition:
        place = cut(journal)
        journal.append(Record(Kind.COMPLETED, {"lease": "", "shard": 0}))
        return LogPosition(place.serial, journal.appended)

    patch.setattr(Journal, "cut", late)


@planted(servers=1)
def forgets_one_sequence(patch: pytest.MonkeyPatch) -> None:
    """A lease's fourth commit is not remembered, so that a repeat of it is applied again."""
    finish = Core.finish

    def forgetful(core: Core, step: Step, pi: PiStatistics | None, now: float) -> Applied:
        lease = step.commit.lease
        applied = finish(core, step, pi, now)
        if applied.sequence == 4:
            lease.sequence -= 1
        return applied

    patch.setattr(Core, "finish", forgetful)


@planted(servers=1)
def forgets_the_answers_of_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    of = LeaseState.of
    patch.setattr(LeaseState, "of", lambda lease: replace(of(lease), answer=None, sequence=lease.sequence - 1))


@planted(servers=1)
def releases_tickets_early(patch: pytest.MonkeyPatch) -> None:
    """A ticket is taken while the gradient is still arriving."""
    patch.setattr(Machine, "tickets_at_once", True)


@planted(servers=1, seed=1)
def serves_the_newest_ticket_first(patch: pytest.MonkeyPatch) -> None:
    def newest(machine: Machine) -> Commit | Plan | Release:
        return machine.server.queue.pop()

    patch.setattr(Machine, "next_commit", newest)


@planted(servers=1, seed=1)
def reads_without_a_record(patch: pytest.MonkeyPatch) -> None:
    """A pull changes a snapshot, and the log does not say so."""

    def unrecorded(core: Core, lease: Lease) -> Callable[[], int]:
        return partial(core.pull, lease)

    patch.setattr(Core, "plan_pull", unrecorded)


@planted(servers=1, seed=21)
def writes_buffers_that_go_on_changing(patch: pytest.MonkeyPatch) -> None:
    """A commit does not wait for the copy of what it is about to change."""
    patch.setattr(Lease, "about_to_change", lambda lease: None)


@planted(servers=1, seed=2)
def waits_for_a_checkpoint_on_the_event_loop(patch: pytest.MonkeyPatch) -> None:
    """A small commit is applied on the event loop's thread, though it may wait for the checkpoint's."""
    patch.setattr(apply_loop, "runs_inline", lambda core, lease: core.central.size <= apply_loop.INLINE_PARAMETERS)


@planted(servers=1, seed=1)
def keeps_what_a_checkpoint_captured_that_failed_early(patch: pytest.MonkeyPatch) -> None:
    """Commits wait for it for ever: there is nobody who would write it."""
    made: list[Path] = []
    make_directory, close = SimulatedDisk.make_directory, Capture.close
    patch.setattr(SimulatedDisk, "make_directory", lambda disk, path: made.append(path) or make_directory(disk, path))

    def careless(captured: Capture) -> None:
        if made:
            close(captured)
        made.clear()

    patch.setattr(Capture, "close", careless)


@planted(servers=1, seed=42)
def fails_a_checkpoint_whose_predecessors_stay(patch: pytest.MonkeyPatch) -> None:
    """It is written, and an older one can't be removed."""

    def remove_old(directory: Path, newest: Path, keep: int, storage: Storage, *_: object) -> None:
        for old in [other for other in checkpoint.list_checkpoints(directory, storage) if other != newest][keep - 1 :]:
            storage.remove(old)

    patch.setattr(checkpoint, "_remove_old", remove_old)


@planted(servers=1, seed=14)
def writes_what_is_shared_as_it_goes_on_changing(patch: pytest.MonkeyPatch) -> None:
    """What the rule keeps for all workers is not copied with θ."""
    copy_theta = Capture.copy_theta

    def copies_theta_alone(captured: Capture) -> None:
        copy_theta(captured)
        captured._copies[""] = dict(captured._core.shared.buffers)

    patch.setattr(Capture, "copy_theta", copies_theta_alone)


@planted(servers=1, seed=29)
def forgets_the_numbers_that_are_shared(patch: pytest.MonkeyPatch) -> None:
    restore = checkpoint.restore

    def forgetful(path: Path, state: State, core: Core, now: float) -> None:
        restore(path, state, core, now)
        core.shared.numbers = dict(core.rule.numbers)

    patch.setattr(checkpoint, "restore", forgetful)


@planted(servers=1, seed=1)
def begins_the_average_anew_from_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    restore = checkpoint.restore

    def anew(path: Path, state: State, core: Core, now: float) -> None:
        restore(path, state, core, now)
        core.central.average = None
        core.central.begin_average()

    patch.setattr(checkpoint, "restore", anew)


@planted(servers=1, seed=1)
def looks_ahead_by_the_staleness_at_arrival(patch: pytest.MonkeyPatch) -> None:
    """A commit waits for its turn meanwhile, and in a replay it does not."""
    ticket, begin, versions = Core.ticket, Core.begin, dict[int, int]()

    def noted(core: Core, *arguments: Any, **options: Any) -> Commit:
        commit = ticket(core, *arguments, **options)
        versions[id(commit.header)] = core.central.version
        return commit

    def early(core: Core, commit: Commit) -> Step:
        waited = core.central.version - versions[id(commit.header)]

        def less(staleness: int, *others: Any) -> RuleInput:
            made = RuleInput(staleness - waited, *others)
            return replace(made, passed=(made.passed or 0.0) - waited, meanwhile=(made.meanwhile or 0.0) - waited)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(state_machine, "RuleInput", less)
            return begin(core, commit)

    patch.setattr(Core, "ticket", noted)
    patch.setattr(Core, "begin", early)


@planted(servers=1, seed=4)
def forgets_shares_in_a_replay(patch: pytest.MonkeyPatch) -> None:
    """Every commit in the log counts as one of a whole batch."""
    header = replay._header
    patch.setattr(replay, "_header", lambda core, fields: replace(header(core, fields), share=0.0))


@planted(servers=1)
def counts_from_a_workers_last_version_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint does not tell how much had been committed when a worker got its θ."""
    of = LeaseState.of
    patch.setattr(LeaseState, "of", lambda lease: replace(of(lease), progress=0.0, spare_progress=0.0))


@planted(servers=1, seed=17)
def counts_a_version_for_a_discarded_commit(patch: pytest.MonkeyPatch) -> None:
    finish = Core.finish

    def counting(core: Core, step: Step, pi: PiStatistics | None, now: float) -> Applied:
        applied = finish(core, step, pi, now)
        if applied.discarded:
            core.central.version += 1
            return replace(applied, version=applied.version + 1)
        return applied

    patch.setattr(Core, "finish", counting)


@planted(servers=1, seed=17)
def logs_no_discarded_commit(patch: pytest.MonkeyPatch) -> None:
    """It changed nothing, one might think."""
    begin = Core.begin

    def unlogged(core: Core, commit: Commit) -> Step:
        late = core.central.version - commit.header.base_version
        if core.rule.accepts(RuleInput(late)):
            return begin(core, commit)
        recorder = core.record
        core.record_to(lambda record: commit.lease.recorded)
        try:
            return begin(core, commit)
        finally:
            core.record_to(recorder)

    patch.setattr(Core, "begin", unlogged)


@planted(servers=1, seed=13)
def trusts_the_leases_of_a_log(patch: pytest.MonkeyPatch) -> None:
    """A start without a log may have acknowledged commits since the log's end."""

    def mark_restarted(core: Core, shard_ids: int | None) -> None:
        if shard_ids is not None:
            core.ledger.number_anew(shard_ids)

    patch.setattr(Core, "mark_restarted", mark_restarted)


@planted(servers=1, seed=13)
def gives_out_the_shard_ids_of_a_lost_start_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardLedger, "number_anew", lambda ledger, number: None)


@planted(servers=1, seed=32)
def receives_into_memory_that_the_log_still_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upload, "hold", lambda upload: None)


@planted(servers=1, seed=6)
def receives_into_memory_that_is_in_use(patch: pytest.MonkeyPatch) -> None:
    """A call that was ended, on a thread of the lane, may write for a moment longer."""

    def end(uploads: Uploads, upload: Upload) -> None:
        original(uploads, upload)
        uploads._freed(upload)

    original = Uploads.end
    patch.setattr(Uploads, "end", end)


def leaves_out(kind: Kind) -> Plant:
    """One kind of record is never written."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        append = Journal.append
        patch.setattr(
            Journal, "append", lambda journal, record: journal.appended if record.kind is kind else append(journal, record)
        )

    plant.__name__ = f"leaves_out_{kind}"
    return plant


for each in Kind:
    planted(servers=1, seed=65 if each is Kind.RELEASED else 2)(leaves_out(each))


@pytest.mark.parametrize(("plant", "servers", "seed"), BUGS)
def test_a_planted_bug_is_caught(
    plant: Plant, servers: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    most, steps = (SEEDS, STEPS) if servers == 1 else (SEVERAL_SEEDS, SEVERAL_STEPS)
    with small():
        for tried in [seed, *(other for other in range(most) if other != seed)]:
            (folder := tmp_path / str(tried)).mkdir()
            try:
                World(tried, folder, servers).run(steps)
            except (AssertionError, DamagedLog, BadCheckpoint):
                return
    pytest.fail(f"{most} seeds did not find it")
