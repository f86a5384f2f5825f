"""A simulated server's process: its log, its checkpoints, its treacherous disk, and its starts after a crash.

One thread, no time but the one told here. A `PowerFailure` that a method raises is to be followed by `crash`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import structlog
from gem_api.errors import CheckpointFailed, Overloaded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.ranges import WHOLE, Range
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery
from gem_server.durability.checkpointer import Checkpointer
from gem_server.durability.group_commit import THREADS
from gem_server.durability.journal import Journal, Stall
from gem_server.durability.log_file import LogFile
from gem_server.durability.write_order import WriteOrder
from gem_server.telemetry.progress import Progress
from simulation.client import Request, Response
from simulation.disk import PowerFailure, SimulatedDisk
from simulation.server import BetweenCommits, Log, Server, SimulatedCheckpointer, Waiter, in_thread
from simulation.truth import Truth, fingerprint, require

SILENT = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
LEASE_SECONDS = 30.0


@dataclass(frozen=True)
class Setup:
    """How a server is started.

    Attributes:
        settings: The run's hyper-parameters.
        choice: The optimizer that workers bring.
        layout: The whole model's tensors.
        part: Which part of the model the server holds.
        unlogged: How often a start keeps no log, from 0 to 1.
        memory_limit: As for `Core`.
    """

    settings: Hyperparameters
    choice: OptimizerChoice | None
    layout: Layout
    part: Range = WHOLE
    unlogged: float = 0.0
    memory_limit: int = 0

    def new_core(self, run_id: str, settings: Hyperparameters, new_id: Callable[[], str], logged: bool = False) -> Core:
        return Core(
            run_id, settings, lease_seconds=LEASE_SECONDS, memory_limit=self.memory_limit, new_id=new_id, logged=logged,
            part=self.part,
        )  # fmt: skip


class Host:
    """One server's process on its disk, from one crash to the next. It serves no calls.

    Args:
        setup: How it is started.
        folder: An empty folder, its disk's.
        random: Decides everything.
        new_id: Makes lease ids.
        truth: Checks its promises.
        network: Where its responses go.

    Attributes:
        layout: What it holds of the model.
        now: Its clock, in seconds.
        crashes: How often its power has failed.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        random: Random,
        new_id: Callable[[], str],
        truth: Truth,
        network: list[Request | Response],
    ) -> None:
        self.setup = setup
        self.layout = setup.layout.part(setup.part)
        self.random = random
        self.disk = SimulatedDisk(folder, random)
        (folder / "log").mkdir()
        self.truth = truth
        self.network = network
        self.now = 0.0
        self.crashes = 0
        self._new_id = new_id
        self._damaged: set[Path] = set()
        self._runs = 0
        self.server = self._new_server()

    def close(self) -> None:
        """Ends what takes long, and the open files."""
        self._end_jobs()
        self.disk.close()

    def _end_jobs(self) -> None:
        jobs = [job for _, job in self.server.jobs]
        for job in [*jobs, self.server.checkpoint] if self.server.checkpoint is not None else jobs:
            job.close()

    # -- the server's turns: what its log and chores do

    def take(self) -> None:
        """A thread of the log takes what may be written, unless both are busy."""
        log = self.server.log
        if log is not None and log.writing is None and len(log.written) + len(log.synced) < THREADS:
            log.writing = log.order.ready()

    def write(self) -> None:
        log = self.server.log
        if log is None or log.writing is None:
            return
        group, log.writing = log.writing, None
        try:
            log.file.write(group)
        except OSError:
            self._stall()  # the disk is full: again later
            return
        log.order.written(group)
        log.written.append(group)

    def sync(self) -> None:
        """One of the groups is synced. It is acknowledged at its turn."""
        log = self.server.log
        if log is not None and log.written:
            log.file.sync()
            log.synced.append(log.written.pop(self.random.randrange(len(log.written))))
            for group in sorted(log.synced):
                if log.order.is_next(group):
                    log.synced.remove(group)
                    self._tell(log.order.acknowledge(group))

    def _stall(self) -> None:
        """Nothing can be acknowledged until there is room."""
        log = self.server.log
        assert log is not None
        log.order.journal.stall = Stall("no room", self.now, 0, 0)
        for waiter in log.order.dismiss():
            self.network.append(Response(waiter.response.request, error=Overloaded("no room")))

    def _tell(self, waiters: Iterable[Waiter]) -> None:
        """Sends the responses that nothing holds back."""
        for response, told in waiters:
            told()
            self.network.append(response)

    def checkpoint(self) -> None:
        """Begins a checkpoint, which is written while the run continues."""
        server = self.server
        if server.core.central.initialized and server.checkpoint is None:
            server.checkpoint = self.checkpointer().write()

    def checkpointer(self) -> Checkpointer:
        """What writes the server's checkpoints. With a log, one must be written before the log is."""
        server = self.server
        if server.checkpointer is None:
            if server.logged and server.log is None:
                server.log = self._new_log(self._first_run_id, 0)
            log = server.log
            server.checkpointer = SimulatedCheckpointer(
                self.disk.root, 2, server.core, BetweenCommits(server), Progress(started=self.now), lambda: self.now, SILENT,
                after_write=lambda: self._tell(log.order.base_written()) if log else None,
                journal=log.order.journal if log else None, storage=self.disk, in_thread=in_thread,
            )  # fmt: skip
        return server.checkpointer

    def save(self) -> None:
        """The next step of a checkpoint: its memory is prepared, the state is captured, the files are written."""
        server, before = self.server, checkpoint.list_checkpoints(self.disk.root)
        if server.checkpoint is None:
            return
        try:
            server.checkpoint.send(None)
        except StopIteration:
            server.checkpoint = None
        except CheckpointFailed:  # the one before it stands
            server.checkpoint = None
            require(
                checkpoint.list_checkpoints(self.disk.root) == before, "a checkpoint that is written is said to have failed"
            )
            if server.log is not None and not server.log.order.based:
                self._stall()
        if server.checkpoint is None:
            kept = [lease.worker for lease in server.core.leases.live.values() if lease.before_change is not None]
            require(not kept, f"a checkpoint is over, and still keeps buffers of {kept}")

    def expire(self, most: float = 20) -> None:
        """Time passes, at most so many seconds; the server ends the leases whose time is up."""
        self.now += self.random.uniform(0, most)
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

    def calm(self) -> None:
        """The disk works from now on."""
        self.disk.capacity = self.disk.fails_in = None
        self.disk.sick = False

    def crash(self) -> None:
        """The power fails, and the server restarts, perhaps more than once."""
        self.crashes += 1
        self._end_jobs()
        self.disk.fail()
        self.disk.capacity = None
        if not self.server.logged:
            self.truth.forgets()
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
            partial(self.setup.new_core, new_id=self._new_id, logged=logged),
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
        if self.setup.part.whole and self.random.random() < 0.5:  # with several, all would have to
            recovered.core.change(replace(recovered.core.settings, learning_rate=self.random.choice([0.01, 0.05, 0.2])))
        if not logged:
            return Server(recovered.core, logged=False)
        self.server = Server(recovered.core, log=self._new_log(recovered.core.run_id, recovered.number))
        self.checkpointer().write_now()
        recovery.begin_life(recovered.core)
        return self.server

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
        self.truth.begins_anew()
        self._runs += 1
        logged = self._starts_logged()
        self.truth.unlogged = not logged
        return Server(self.setup.new_core(self._first_run_id, self.setup.settings, self._new_id, logged), logged)

    def _starts_logged(self) -> bool:
        """Whether a start of the server writes a log."""
        return self.random.random() >= self.setup.unlogged

    @property
    def _first_run_id(self) -> str:
        """The id of the run that the last start without a checkpoint began. A server that does not lead gives it up."""
        return f"run{self.setup.part.index}{self._runs:04d}"

    def _new_log(self, run_id: str, number: int) -> Log:
        directory = recovery.log_directory(self.disk.root)
        journal = Journal(run_id, recovery.next_serial(self.disk.root), number)
        return Log(WriteOrder(journal), LogFile(self.disk, directory, lambda: self.random.getrandbits(32)))

    def _note(self) -> None:
        """Records the run's state after its last record, unless a commit is being applied."""
        log = self.server.log
        if log is not None and log.order.based and not self.server.busy:
            self.truth.prints[log.order.journal.appended] = fingerprint(self.server.core)
