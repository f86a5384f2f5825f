"""One simulated server, of a range or of all: what its servicer does with requests, and its apply loop with commits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gem_api.errors import GemError, LeaseEnded, Overloaded, RejectedCommit, SequenceGap
from gem_api.wire import wire_format
from gem_server import apply_loop
from gem_server.core.central_variable import require_finite
from gem_server.core.commits import Arrived, Commit
from gem_server.core.leases import Lease
from gem_server.core.shards import NoShard
from gem_server.core.uploads import Upload
from gem_server.core.values import Admission, Header, LeaderRegistration, PullDecision
from simulation.client import SAMPLES, Request, Response
from simulation.everywhere import Everywhere
from simulation.host import Host, Setup
from simulation.server import Arriving, Log, Plan, Release, Waiter, waits_for_checkpoint
from simulation.truth import History, Truth, require


class Machine(Host):
    """One server, from one crash to the next.

    Args:
        setup: How it is started.
        folder: An empty folder, its disk's.
        random: Decides everything.
        new_id: Makes lease ids.
        everywhere: What all servers have promised together.
        network: Where its responses go.

    Attributes:
        tickets_at_once: A bug to be planted: a commit gets its ticket before its gradient is whole.
    """

    tickets_at_once = False
    held = 0  # replies so far

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        random: Random,
        new_id: Callable[[], str],
        everywhere: Everywhere,
        network: list[Request | Response],
    ) -> None:
        super().__init__(setup, folder, random, new_id, everywhere.ranges[setup.part.index], network)
        self.everywhere = everywhere

    # -- the server's calls: what its servicer does

    def serve(self, request: Request) -> None:
        try:
            getattr(self, f"_serve_{request.kind}")(request, **request.fields)
        except GemError as error:
            self.server.core.pop_ended_leases()
            self.refuse(request, error)

    def refuse(self, request: Request, error: GemError) -> None:
        """Answers with an error."""
        if request.kind == "commit" and isinstance(error, RejectedCommit) and not isinstance(error, SequenceGap):
            known = request.fields["lease"], request.fields["sequence"]
            self.everywhere.rejected.add((known, self.setup.part.index))
        self.network.append(Response(request, error=error))

    def refuse_all(self, header: Header, error: GemError) -> None:
        """Answers with an error to all who wait for a commit."""
        for request in self.server.asked.pop((header.lease_id, header.sequence), []):
            self.refuse(request, error)

    def _serve_register(self, request: Request, overlap: bool, leader: LeaderRegistration | None = None) -> None:
        core, setup = self.server.core, self.setup
        self._require_writable()
        try:
            joined = core.register(request.worker, setup.layout, self.now, overlap, choice=setup.choice, leader=leader)
        finally:
            core.pop_ended_leases()
        self._answer(request, (joined, LeaderRegistration(joined.lease_id, core.run_id, core.settings)))

    def _serve_renew(self, request: Request, lease: str) -> None:
        self.server.core.renew(lease, self.now)
        if request.operation:  # not from the background
            self._answer(request, None)

    def _serve_initialize(self, request: Request, lease: str) -> None:
        core = self.server.core
        core.require_initializer(lease, self.now)
        core.central.theta[:] = np.arange(self.layout.begin, self.layout.end)
        core.initialized()
        self.truth.started(core)
        self.checkpoint()
        if self.server.log is not None:
            self.server.log.order.begin()
        self._answer(request, None)

    def _serve_pull(self, request: Request, lease: str) -> None:
        server = self.server
        decision = server.core.pull_decision(lease, self.now)
        waits = server.busy or server.queue or waits_for_checkpoint(server.core.leases.get(lease))
        if decision is not PullDecision.READY or waits:
            if decision is PullDecision.INITIALIZE:
                self._answer(request, None)
            return  # it waits for its turn; the worker asks again
        self._require_writable()
        self._give_up(lease)
        holder = server.core.leases.get(lease)
        version = server.core.plan_pull(holder)()
        made = self.truth.makes(server.core, holder)
        self._note()
        self._answer(request, version, lambda: self.truth.pulls(lease, version, made))

    def _serve_shard(self, request: Request, lease: str, holding: tuple[int, ...]) -> None:
        self.server.core.renew(lease, self.now)
        self._require_writable()
        shard = self.server.core.lease_shard(lease, SAMPLES, self.now, holding)
        if isinstance(shard, NoShard):
            self._answer(request, "complete" if shard.complete else None)
            return
        told = (shard.group, shard.epoch, shard.begin, shard.end)
        self.truth.deals(told)
        self._answer(request, shard, lambda: self.truth.names(shard.shard_id, told))

    def _serve_complete(self, request: Request, lease: str, shard: int) -> None:
        core = self.server.core
        self._require_writable()
        held = core.ledger.held.get(shard)
        accepted = core.complete_shard(lease, shard, self.now)
        done = held[1] if held is not None and accepted else None
        what = (done.group, done.epoch, done.begin, done.end) if done else None
        self._answer(request, accepted, lambda: self.truth.completes(what) if what else None)
        if held is not None and shard not in core.ledger.held:
            self.everywhere.completes(lease, shard)

    def _serve_commit(
        self, request: Request, lease: str, sequence: int, base: int, dtype: int, share: float, payload: bytes
    ) -> None:
        server, core = self.server, self.server.core
        header = Header(
            lease, sequence, base, self.layout.fingerprint, None, self.setup.settings.batch_size, core.rule.kind, share
        )  # fmt: skip
        older = server.arriving.pop(lease, None)
        begun = older is not None and older.request.operation == request.operation
        if older is not None and not begun:
            self._end(older)  # a newer call under the same lease ends an older one
            older = None
        try:
            admission, holder = core.admit(header, self.now)
            if admission is Admission.FRESH:
                self._give_up(lease)
                self._require_writable()
                older = older or Arriving(request, header, server.uploads.begin(lease, 4 * self.layout.size))
                whole, mine = self._arrives(older.upload, dtype, payload, begun), older
                older = None
                if not whole:
                    server.arriving[lease] = mine
                    self.network.append(request)
                    return
                server.queue.append(self._submit(holder, header, mine.upload, Arrived(dtype, [memoryview(payload)])))
        finally:
            if older is not None:
                self._end(older)
        if admission is Admission.REPEATED and lease not in server.held:
            self._acknowledge(request, holder.lease_id)
            return
        server.asked.setdefault((lease, sequence), []).append(request)
        if admission is Admission.REPEATED and server.releases.release(lease, self.now):
            self._release([lease])

    def _arrives(self, upload: Any, dtype: int, payload: bytes, begun: bool) -> bool:
        """Whether a gradient is whole: it may wait for its turn (`upload` is a future), and half of it may be there before the
        rest."""
        if isinstance(upload, Future):
            if not upload.done():
                return False
            upload = upload.result()
        wire_format(dtype).assembly(upload.gradient).add_all(memoryview(payload))
        require_finite(upload.gradient, self.server.core.rule.largest, "gradient")
        if begun and self.random.random() >= 0.3:
            return True
        upload.gradient[self.layout.size // 2 :] = 0
        return self.tickets_at_once

    def _submit(self, holder: Lease, header: Header, upload: Any, arrived: Arrived) -> Commit:
        """Gives a commit its ticket; its call's use of the memory becomes the queue's."""
        upload = upload.result() if isinstance(upload, Future) else upload
        self.server.uploads.end(upload)
        try:
            return self.server.core.ticket(holder, header, self.now, upload, arrived)
        except BaseException:
            upload.release()
            raise

    def _end(self, arriving: Arriving) -> None:
        """Ends a call. On a thread of the lane it goes on writing for a moment."""
        if isinstance(arriving.upload, Upload):
            self.server.ended.append(arriving.upload)
        else:
            self.server.uploads.give_up(arriving.upload)

    def _end_late_calls(self) -> None:
        """The calls that were ended stop writing; so do those of leases that have ended."""
        server = self.server
        for lease_id in server.arriving.keys() - server.core.leases.live.keys():
            self._end(server.arriving.pop(lease_id))
        for upload in server.ended:
            upload.gradient[:] = 7.0
            server.uploads.end(upload)
            upload.release()
        server.ended.clear()
        server.now = self.now
        server.uploads.end_slow_turns()
        server.uploads.trim()
        waiting = server.log and server.log.order.journal._waiting
        if not (server.arriving or server.queue or server.busy or waiting):
            memory = server.core.memory
            require(memory.uploads <= memory.usual_uploads, "memory of gradients that nobody uses is kept")

    def _acknowledge(self, request: Request, lease_id: str) -> None:
        lease = self.server.core.leases.live.get(lease_id)
        if lease is None or lease.last_applied is None:
            self.refuse(request, LeaseEnded("ended while it waited"))
            return
        applied = replace(lease.last_applied, base_version=lease.base_version)
        made, due = self.truth.replies[lease_id][-1], lease.recorded
        self._answer(request, applied, lambda: self.truth.acknowledges(lease_id, applied, made), due)

    def _require_writable(self) -> None:
        log = self.server.log
        if log is not None and log.order.journal.stall is not None:
            raise Overloaded("no room")

    def _answer(self, request: Request, value: Any, told: Callable[[], object] = lambda: None, due: int | None = None) -> None:
        """Replies once everything so far is on the disk, or the record `due`."""
        self._note()
        log, waiter = self.server.log, Waiter(Response(request, value), told)
        number = due if due is not None else log.order.journal.appended if log is not None else 0
        if log is None or not self.awaits(log, number):
            self._tell([waiter])
        elif log.order.journal.stall is not None:
            self.refuse(request, Overloaded("no room"))
        else:
            log.order.wait(number, waiter)

    def awaits(self, log: Log, number: int) -> bool:
        """Whether a response waits for a record."""
        return log.order.awaits(number)

    # -- checkpoints that an operator asks for

    def _serve_create(self, request: Request) -> None:
        self.server.jobs.append((request, self.checkpointer().write()))

    def work(self) -> None:
        """The next step of one of the calls that take long."""
        if not self.server.jobs:
            return
        request, job = self.random.choice(self.server.jobs)
        try:
            job.send(None)
        except StopIteration as returned:
            self.server.jobs.remove((request, job))
            self.network.append(Response(request, returned.value))
        except GemError as error:
            self.server.jobs.remove((request, job))
            self.refuse(request, error)

    # -- the server's turns: what its apply loop does

    def begin(self) -> None:
        server = self.server
        self._end_late_calls()
        self.look()
        if not server.busy and server.queue:
            commit = self.next_commit()
            if isinstance(commit, Plan):
                commit.run()
                return
            if isinstance(commit, Release):
                commit.work, server.releasing = server.releases.plan(commit.lease_ids), commit
                self.truth.being_made.update(commit.lease_ids)
                return
            try:
                server.step = server.core.begin(commit)
                self.truth.being_made.add(commit.header.lease_id)
                self.truth.begun = (commit.header.lease_id, commit.header.sequence)
            except LeaseEnded:
                commit.upload.release()
                self.refuse_all(commit.header, LeaseEnded("ended while it waited"))

    def next_commit(self) -> Commit | Plan | Release:
        """What is at the head of the queue."""
        return self.server.queue.popleft()

    def finish(self) -> None:
        server = self.server
        if server.releasing is not None:
            self._finish_release(server.releasing)
        elif server.step is not None:
            if waits_for_checkpoint(server.step.commit.lease):
                inline = apply_loop.runs_inline(server.core, server.step.commit.lease)
                require(not inline, "the event loop waits for a checkpoint, which can't be written then")
                return  # the apply thread waits
            step, server.step, server.just_made = server.step, None, False
            applied = server.core.finish(step, step.run(), self.now)
            step.commit.upload.release()
            lease = step.commit.lease
            self.truth.applies(lease.lease_id, applied, server.core)
            self.truth.makes(server.core, lease)
            self._note()
            if server.core.settings.reply_wait and server.releases.applied(step, self.now):
                server.held[lease.lease_id] = applied.sequence
                self.held += 1
            else:
                self._acknowledge_all(lease.lease_id, applied.sequence)
            self.look(between=True)

    def _acknowledge_all(self, lease_id: str, sequence: int) -> None:
        """Answers all who wait for a commit."""
        for request in self.server.asked.pop((lease_id, sequence), []):
            self._acknowledge(request, lease_id)

    # -- held replies: what `HeldReplies` does

    def tick(self) -> None:
        """A moment passes."""
        self.now += self.random.uniform(0, 0.3)
        self.look()

    def look(self, between: bool = False) -> None:
        """Releases the held replies whose time has come, and gives up those whose leases have ended."""
        server = self.server
        for lease_id in server.held.keys() - server.core.leases.live.keys():
            self.give_up_ended(lease_id)
        if due := server.releases.due(self.now):
            self._release(due, between)
        look = server.releases.next_look(self.now)
        require(look is None or look > self.now, "held replies are looked at again and again")

    def give_up_ended(self, lease_id: str) -> None:
        """The lease of a held reply has ended."""
        server, sequence = self.server, self.server.held[lease_id]
        self._give_up(lease_id)
        for request in server.asked.pop((lease_id, sequence), []):
            self.refuse(request, LeaseEnded("ended while its reply was held"))

    def _give_up(self, lease_id: str) -> None:
        """A newer call ends the one whose reply is held: its worker asks again."""
        self.server.releases.forget(lease_id)
        self.server.asked.pop((lease_id, self.server.held.pop(lease_id, 0)), None)

    def _release(self, lease_ids: list[str], between: bool = False) -> None:
        server, live = self.server, self.server.core.leases.live
        leases = [live[lease_id] for lease_id in lease_ids if lease_id in live]
        at_once = all(apply_loop.runs_inline(server.core, lease) for lease in leases)
        if at_once and (between or not (server.busy or server.queue)):
            require(not waits_for_checkpoint(*leases), "the event loop waits for a checkpoint with a held reply")
            server.releases.plan(lease_ids)()
            self._made(lease_ids)
        else:
            server.queue.append(Release(lease_ids))

    def _finish_release(self, release: Release) -> None:
        """Unless the apply thread waits for a checkpoint."""
        live = self.server.core.leases.live
        if not waits_for_checkpoint(*(live[lease_id] for lease_id in release.lease_ids if lease_id in live)):
            self.server.releasing = None
            release.work()
            self._made(release.lease_ids)

    def _made(self, lease_ids: list[str]) -> None:
        server = self.server
        server.just_made = True
        for lease_id in lease_ids:
            if lease_id in server.core.leases.live:
                self.truth.makes(server.core, server.core.leases.live[lease_id])
        self._note()
        for lease_id in lease_ids:
            if (sequence := server.held.pop(lease_id, None)) is not None:
                server.releases.forget(lease_id)
                self._acknowledge_all(lease_id, sequence)

    # -- disasters

    def crash_while_held(self) -> None:
        """The power fails while a reply is held, or when one has just been made."""
        if self.server.held or self.server.just_made:
            self.crash()

    def end_while_held(self) -> None:
        """The lease of a held reply ends."""
        live = sorted(self.server.held.keys() & self.server.core.leases.live.keys())
        if live:
            self.server.core.leave(self.random.choice(live))
            self._note()

    def lose_disk(self) -> None:
        """The folder is gone for ever, and a server starts with an empty one."""
        index = self.setup.part.index
        self.everywhere.forgetful.add(index)
        self.truth = self.everywhere.ranges[index] = Truth()
        self.disk.wipe()
        self.crash()

    def go_back(self, copy: Path, history: History) -> None:
        """An operator starts the server with a folder that holds the copy of one checkpoint, and no log. The history led to
        that checkpoint."""
        self.disk.wipe()
        folder = self.disk.root / copy.name
        self.disk.make_directory(folder)
        for original in copy.iterdir():
            with closing(self.disk.create(folder / original.name)) as file:
                file.write(0, [original.read_bytes()])
                file.sync()
        self.disk.sync_directory(folder)
        self.disk.sync_directory(self.disk.root)
        self.truth.goes_back(history)
        self.crash()
