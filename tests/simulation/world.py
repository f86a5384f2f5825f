"""The whole core under a seeded scheduler: a server on a treacherous disk, a network that delays, drops, repeats and
reorders, workers that die. One thread, no sockets, no time but the one told here. The same seed does the same again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import structlog
from gem_api.errors import CheckpointFailed, GemError, LeaseEnded, Overloaded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.wire import gradient_format
from gem_server import apply_loop
from gem_server.core.commits import Arrived, Commit
from gem_server.core.facts import Admission, Header, PullDecision
from gem_server.core.shards import NoShard
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery
from gem_server.durability import journal as journal_module
from gem_server.durability.checkpointer import Checkpointer
from gem_server.telemetry.progress import Progress
from simulation.client import SAMPLES, SIZE, Client, Request, Response
from simulation.disk import PowerFailure, SimulatedDisk
from simulation.runs import EPOCHS, some_optimizer, some_settings
from simulation.server import BetweenCommits, Server, Upload, in_thread, waits_for_checkpoint
from simulation.truth import Truth, fingerprint, require

SILENT = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
LAYOUT = Layout.of({"w": (SIZE,)})
LEASE_SECONDS = 30.0
MAX_CALM_STEPS = 20_000


class World:
    """One simulation.

    Args:
        seed: Decides everything.
        folder: An empty folder, the disk's.
        clients: Workers at first.

    Attributes:
        tickets_at_once: A bug to be planted: a commit gets its ticket before its gradient is whole.
    """

    tickets_at_once = False

    def __init__(self, seed: int, folder: Path, clients: int = 3) -> None:
        self.random = random = Random(seed)
        self.disk = SimulatedDisk(folder, random)
        (folder / "log").mkdir()
        self.truth = Truth()
        self.now = 0.0
        self.crashes = 0
        self.network: list[Request | Response] = []
        self._damaged: set[Path] = set()
        self._ids = self._runs = 0
        self._names = clients
        self._unlogged = 0.5 if random.random() < 0.3 else 0.0  # how often a start keeps no log
        self.clients = {f"w{number}": Client(f"w{number}", random, random.random() < 0.3) for number in range(clients)}
        drawn = some_settings(random)
        # Drawn apart, so that the other draws stay as they are.
        self.settings, self._choice = some_optimizer(drawn, Random(f"{seed}: the optimizer"))
        self._memory_limit = 0
        self._memory_limit = self._some_memory_limit(clients)
        self.server = self._new_server()

    # -- the scheduler

    def run(self, steps: int) -> None:
        """Makes a number of steps with faults, then steps without faults until the run is complete."""
        try:
            self._run(steps)
        finally:
            if self.server.checkpoint is not None:
                self.server.checkpoint.close()
            self.disk.close()

    def _run(self, steps: int) -> None:
        self._steps(steps, self.trouble())
        self.disk.capacity = self.disk.fails_in = None
        self.disk.sick = False
        quiet = [*self.peace(), (self.checkpoint, 0.2), (self.save, 0.6), (self.expire, 0.05)]
        for _ in range(MAX_CALM_STEPS // 100):
            self._steps(100, quiet)
            if all(client.done for client in self.clients.values()):
                break
        require(all(client.done for client in self.clients.values()), "the run does not come to its end")
        require(self.server.core.ledger.samples_completed == EPOCHS * SAMPLES, "not every sample of every epoch was trained on")
        self.crash()

    def peace(self) -> list[tuple[Callable[[], None], float]]:
        """The events that always happen, with their weights."""
        return [
            (self.client_acts, 8), (self.deliver, 12), (self.begin, 6), (self.finish, 6), (self.take, 3), (self.write, 3),
            (self.sync, 3),
        ]  # fmt: skip

    def trouble(self) -> list[tuple[Callable[[], None], float]]:
        """The events that may happen, with their weights."""
        return [
            *self.peace(), (self.drop, 0.5), (self.repeat, 0.8), (self.checkpoint, 0.5), (self.save, 1.5), (self.expire, 0.2),
            (self.crash, 0.2), (self.crash_soon, 0.2), (self.fill_disk, 0.1), (self.make_room, 0.5), (self.client_dies, 0.1),
            (self.fall_sick, 0.1), (self.recover, 0.2),
        ]  # fmt: skip

    def _steps(self, steps: int, choices: list[tuple[Callable[[], None], float]]) -> None:
        actions, weights = [action for action, _ in choices], [weight for _, weight in choices]
        for action in self.random.choices(actions, weights, k=steps):
            try:
                action()
            except PowerFailure:
                self.crash()
            self._answer_what_is_durable()

    # -- workers and the network

    def client_acts(self) -> None:
        client = self.random.choice(list(self.clients.values()))
        request = client.next_request()
        if request is not None and self.random.random() < 0.5:
            self.network.append(request)

    def client_dies(self) -> None:
        """Kills a worker. Another takes its place, sometimes under the same name."""
        name = self.random.choice(list(self.clients))
        if self.clients[name].done:
            return
        del self.clients[name]
        if self.random.random() < 0.5:
            name, self._names = f"w{self._names}", self._names + 1
        self.clients[name] = Client(name, self.random, self.random.random() < 0.3)

    def deliver(self) -> None:
        if self.network:
            message = self.network.pop(self.random.randrange(len(self.network)))
            if isinstance(message, Request):
                self._serve(message)
            elif message.request.worker in self.clients:
                self.clients[message.request.worker].answered(message)

    def drop(self) -> None:
        if self.network:
            self.network.pop(self.random.randrange(len(self.network)))

    def repeat(self) -> None:
        if self.network:
            self.network.append(self.random.choice(self.network))

    # -- the server's calls: what its servicer does

    def _serve(self, request: Request) -> None:
        try:
            getattr(self, f"_serve_{request.kind}")(request, **request.fields)
        except GemError as error:
            self.server.core.take_dropped()
            self.network.append(Response(request, error=error))

    def _serve_register(self, request: Request, overlap: bool) -> None:
        self._answer(request, self.server.core.register(request.worker, LAYOUT, self.now, overlap, choice=self._choice))

    def _serve_initialize(self, request: Request, lease: str) -> None:
        core = self.server.core
        core.require_initializer(lease, self.now)
        core.central.theta[:] = np.arange(SIZE)
        core.initialized()
        self.truth.started(core)
        self.checkpoint()
        while self.server.checkpoint is not None:
            self.save()
        self._require_based()
        self._answer(request, None)

    def _serve_pull(self, request: Request, lease: str) -> None:
        server = self.server
        decision = server.core.pull_decision(lease, self.now)
        waits = server.step is not None or server.queue or waits_for_checkpoint(server.core.leases.get(lease))
        if decision is not PullDecision.READY or waits:
            if decision is PullDecision.INITIALIZE:
                self._answer(request, None)
            return  # it waits for its turn; the worker asks again
        self._require_based()
        version = server.core.plan_pull(server.core.leases.get(lease))()
        self._note()
        self._answer(request, version, lambda: self.truth.tells(version))

    def _serve_shard(self, request: Request, lease: str, holding: tuple[int, ...]) -> None:
        self._require_based()
        shard = self.server.core.lease_shard(lease, SAMPLES, self.now, holding)
        if isinstance(shard, NoShard):
            self._answer(request, "complete" if shard.complete else None)
            return
        told = (shard.group, shard.epoch, shard.begin, shard.end)
        self.truth.deals(told)
        self._answer(request, shard, lambda: self.truth.names(shard.shard_id, told))

    def _serve_complete(self, request: Request, lease: str, shard: int) -> None:
        core = self.server.core
        held = core.ledger.held.get(shard)
        accepted = core.complete_shard(lease, shard, self.now)
        done = held[1] if held is not None and accepted else None
        what = (done.group, done.epoch, done.begin, done.end) if done else None
        self._answer(request, accepted, lambda: self.truth.completes(what) if what else None)

    def _serve_commit(self, request: Request, lease: str, sequence: int, base: int, dtype: int, payload: bytes) -> None:
        server, core = self.server, self.server.core
        header = Header(lease, sequence, base, LAYOUT.fingerprint, None, self.settings.batch_size, core.rule.kind)
        upload = server.uploads.pop(lease, None)  # a newer call under the same lease ends an older one
        admission, holder = core.admit(header, self.now)
        if admission is Admission.FRESH:
            self._require_based()
            if holder.recorded > self.durable():
                raise Overloaded("the log still needs the last gradient")
            if upload is not None:
                server.ended.append(holder.upload)
                holder.renew_upload()
            form = gradient_format(dtype)
            form.assembly(holder.upload).add_all(memoryview(payload))
            if upload is None or upload.request.operation != request.operation or self.random.random() < 0.3:
                holder.upload[SIZE // 2 :] = 0  # half of it is here
                server.uploads[lease] = Upload(request, header)
                self.network.append(request)
                if not self.tickets_at_once:
                    return
            arrived = Arrived(dtype, [memoryview(payload)])
            server.queue.append(core.ticket(holder, header, self.now, arrived))
        if admission is Admission.REPEATED:
            self._acknowledge(request, holder.lease_id)
        else:
            server.asked.setdefault((lease, sequence), []).append(request)

    def _acknowledge(self, request: Request, lease_id: str) -> None:
        lease = self.server.core.leases.live.get(lease_id)
        if lease is None or lease.last_applied is None:
            self.network.append(Response(request, error=LeaseEnded("ended while it waited")))
            return
        applied = lease.last_applied
        due = lease.recorded
        self._answer(request, applied, lambda: self.truth.acknowledges(lease_id, applied), due)

    def _require_based(self) -> None:
        if self.server.logged and self.server.journal is None:
            raise Overloaded("there is no checkpoint yet")

    def _answer(self, request: Request, value: Any, told: Callable[[], object] = lambda: None, due: int | None = None) -> None:
        """Replies once everything so far is on the disk, or the record `due`."""
        journal = self.server.journal
        number = due if due is not None else journal.appended if journal is not None else 0
        self.server.answers.append((number, Response(request, value), told))
        self._note()

    def _answer_what_is_durable(self) -> None:
        server = self.server
        durable = self.durable()
        for number, response, told in server.answers:
            if number <= durable:
                told()
                self.network.append(response)
        server.answers = [answer for answer in server.answers if answer[0] > durable]

    def durable(self) -> int:
        """Number of the last record on the disk."""
        return self.server.journal.durable if self.server.journal else 0

    def _note(self) -> None:
        """Records the run's state after its last record, unless a commit is being applied."""
        journal = self.server.journal
        if journal is not None and self.server.step is None:
            self.truth.prints[journal.appended] = fingerprint(self.server.core)

    # -- the server's turns: what its apply loop, log and chores do

    def begin(self) -> None:
        server = self.server
        if server.step is None and server.queue:
            commit = self.next_commit()
            for written in server.ended:
                written[:] = 7.0
            server.ended.clear()
            try:
                server.step = server.core.begin(commit)
                self.truth.begun = (commit.header.lease_id, commit.header.sequence)
            except LeaseEnded:
                for request in server.asked.pop((commit.header.lease_id, commit.header.sequence), []):
                    self.network.append(Response(request, error=LeaseEnded("ended while it waited")))

    def next_commit(self) -> Commit:
        """The commit at the head of the queue."""
        return self.server.queue.popleft()

    def finish(self) -> None:
        server = self.server
        if server.step is not None:
            if waits_for_checkpoint(server.step.commit.lease):
                inline = apply_loop.runs_inline(server.core, server.step.commit.lease)
                require(not inline, "the event loop waits for a checkpoint, which can't be written then")
                return  # the apply thread waits
            step, server.step = server.step, None
            applied = server.core.finish(step, step.run(), self.now)
            self.truth.applies(step.commit.header.lease_id, applied, server.core)
            self._note()
            for request in server.asked.pop((step.commit.header.lease_id, applied.sequence), []):
                self._acknowledge(request, step.commit.header.lease_id)

    def take(self) -> None:
        server = self.server
        if server.journal is not None and not server.writing:
            server.writing = server.journal.take()

    def write(self) -> None:
        server = self.server
        if server.journal is not None and server.writing:
            batch, server.writing = server.writing, None
            while server.journal.begins_segment(batch) and server.written:
                self.sync()
            try:
                server.journal.write(batch)
            except OSError:
                return  # the disk is full: again later
            server.journal.written(batch)
            server.written.append(batch[-1].number)

    def sync(self) -> None:
        server = self.server
        if server.journal is not None and server.written:
            server.journal.sync()
            server.journal.done(server.written.popleft())

    def checkpoint(self) -> None:
        """Begins a checkpoint, which is written while the run continues."""
        server = self.server
        if server.core.central.initialized and server.checkpoint is None:
            if server.logged:
                server.unbased = server.journal or server.unbased or self._new_journal(0)
            progress = Progress(started=self.now)
            server.checkpoint = Checkpointer(
                self.disk.root, 2, server.core, BetweenCommits(server), progress, lambda: self.now, SILENT,  # type: ignore[arg-type]
                journal=server.unbased, storage=self.disk, in_thread=in_thread,
            )._write()  # fmt: skip

    def save(self) -> None:
        """The next step of a checkpoint: its memory is prepared, the state is captured, the files are written."""
        server, before = self.server, checkpoint.list_checkpoints(self.disk.root)
        if server.checkpoint is None:
            return
        try:
            server.checkpoint.send(None)
        except StopIteration:
            server.checkpoint, server.journal = None, server.unbased
        except CheckpointFailed:  # the one before it stands
            server.checkpoint = None
            require(
                checkpoint.list_checkpoints(self.disk.root) == before, "a checkpoint that is written is said to have failed"
            )
        if server.checkpoint is None:
            kept = [lease.worker for lease in server.core.leases.live.values() if lease.before_change is not None]
            require(not kept, f"a checkpoint is over, and still keeps buffers of {kept}")

    def expire(self) -> None:
        self.now += self.random.uniform(0, 20)
        self.server.core.expire(self.now)
        self._note()
        self.truth.consistent(self.server.core)

    # -- disasters

    def crash_soon(self) -> None:
        self.disk.fails_in = self.random.randint(0, 12)

    def fill_disk(self) -> None:
        self.disk.capacity = 0

    def make_room(self) -> None:
        self.disk.capacity = None

    def fall_sick(self) -> None:
        self.disk.sick = True

    def recover(self) -> None:
        self.disk.sick = False

    def crash(self) -> None:
        """The power fails, and the server restarts, perhaps more than once."""
        self.crashes += 1
        if self.server.checkpoint is not None:
            self.server.checkpoint.close()
        self.disk.fail()
        self.disk.capacity = None
        if not self.server.logged:
            self.truth.forgets()
            for client in self.clients.values():
                client.done = False  # what is lost has to be done again
        self._damage_a_checkpoint()
        if self.random.random() < 0.2:
            self.disk.fails_in = self.random.randint(0, 20)
        try:
            self.server = self._recover()
        except PowerFailure:
            self.crash()

    def _recover(self) -> Server:
        logged = self._starts_logged()
        recovered = recovery.recover(
            self.disk.root,
            partial(self._new_core, logged=logged),
            self.now,
            self._refused,
            logged=logged,
            random=lambda: self.random.getrandbits(30),
        )
        if recovered is None:
            return self._new_server()
        if recovery.log_position_of(recovered.checkpoint) is None:
            self.truth.prints.clear()  # no record says what it holds
        self.truth.recovered(recovered.core, recovered.number)
        self.truth.unlogged = not logged
        if self.random.random() < 0.5:
            recovered.core.change(replace(recovered.core.settings, learning_rate=self.random.choice([0.01, 0.05, 0.2])))
        if not logged:
            return Server(recovered.core, logged=False)
        server = Server(recovered.core, journal=self._new_journal(recovered.number))
        with closing(recovery.capture(server.core, server.journal)) as captured:
            captured.copy_theta()
            recovery.save(self.disk.root, captured, 2, self.disk)
        recovery.begin_life(server.core)
        return server

    def _damage_a_checkpoint(self) -> None:
        """Damages the newest checkpoint, if an older one and the log since can replace it."""
        found = checkpoint.list_checkpoints(self.disk.root)
        stands_in = len(found) > 1 and (
            recovery.log_position_of(found[0]) is None or recovery.log_position_of(found[1]) is not None
        )
        if stands_in and found[0] not in self._damaged and self.random.random() < 0.4:
            self._damaged.add(found[0])
            self.disk.damage(found[0] / "workers.safetensors")

    def _refused(self, path: Path, why: str) -> None:
        require(path in self._damaged, why)

    def _new_server(self) -> Server:
        require(not self.truth.acknowledged, "the run is gone, though commits of it were acknowledged")
        self._runs += 1
        logged = self._starts_logged()
        self.truth.unlogged = not logged
        return Server(self._new_core(f"run{self._runs:05d}", self.settings, logged), logged)

    def _starts_logged(self) -> bool:
        """Whether a start of the server writes a log."""
        return self.random.random() >= self._unlogged

    def _new_core(self, run_id: str, settings: Hyperparameters, logged: bool = False) -> Core:
        limit = self._memory_limit
        return Core(run_id, settings, lease_seconds=LEASE_SECONDS, memory_limit=limit, new_id=self._new_id, logged=logged)

    def _some_memory_limit(self, clients: int) -> int:
        """0 for no limit; or room for some workers that overlap, and for fewer copies than a checkpoint of them may need."""
        if self.random.random() < 0.5:
            return 0
        core = self._new_core("", self.settings)
        for number in range(clients):
            core.register(f"w{number}", LAYOUT, self.now, overlap=True, choice=self._choice)
        return core.memory.held + self.random.randint(0, 4) * 4 * SIZE

    def _new_journal(self, number: int) -> journal_module.Journal:
        directory = recovery.log_directory(self.disk.root)
        serial = recovery.next_serial(self.disk.root)
        seed: Callable[[], int] = lambda: self.random.getrandbits(32)  # noqa: E731
        return journal_module.Journal(self.disk, directory, self.server_run_id(), serial, number, seed)

    def server_run_id(self) -> str:
        return f"run{self._runs:05d}"

    def _new_id(self) -> str:
        self._ids += 1
        return f"lease-{self._ids}"
