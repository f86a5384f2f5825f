"""One server, or several with a range of θ each, under a seeded scheduler. Each has a treacherous disk. The network delays,
drops, repeats and reorders; workers die, also between two ranges; backups are made meanwhile, and put in place. One thread,
no sockets, no time but the one told here. The same seed does the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random

import pytest
from gem_api import ranges
from gem_api.layout import Layout
from gem_api.ranges import Range
from gem_server.durability import segment
from simulation.backup import Backup
from simulation.client import SAMPLES, Client, Request, Response
from simulation.disk import PowerFailure
from simulation.everywhere import Everywhere
from simulation.host import Setup
from simulation.machine import Machine
from simulation.runs import EPOCHS, some_average, some_optimizer, some_settings, some_shares, some_wait
from simulation.truth import Known, Truth, require

UNIT = 4  # elements: a range begins at a multiple of this here
LAYOUT = Layout.of({"w": (3, 2), "b": (7,)})  # the ranges cut both tensors
MAX_CALM_STEPS = 60_000
CALM_AGAIN = (
    0.02  # how often a request is sent again that is under way; more often by those who have one server, while there is trouble
)
LONGER = 6  # times as many steps if replies wait: that begins when the workers' paces are known
Choices = list[tuple[Callable[[], None], float]]  # actions, with their weights

# How often what happens to a server: if it is alone, and if it is one of several, which have to get on meanwhile.
RARE = {
    "checkpoint": (0.5, 0.2), "save": (2, 1.2), "expire": (0.2, 0.05), "crash": (0.2, 0.02), "crash_soon": (0.2, 0.02),
    "fill_disk": (0.1, 0.02), "make_room": (0.5, 0.1), "fall_sick": (0.3, 0.01), "recover": (0.2, 0.1),
}  # fmt: skip


@contextmanager
def small() -> Iterator[None]:
    """Ranges and files are small inside a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "UNIT", UNIT)
        patch.setattr(segment, "_ALLOCATION", 4096)  # a simulated disk writes what is allocated
        yield


class World:
    """One simulation. Use it inside `small`.

    Args:
        seed: Decides everything.
        folder: An empty folder, for the disks.
        count: How many servers there are.
        clients: Workers at first.
        backups: How many times as often backups begin, and go on, as in the seeds that find planted bugs.

    Attributes:
        random: The only source of chance.
        network: The messages that are under way.
        machines: The servers, by range.
        truth: What they have promised together.
        clients: The workers, by name.
        went_back: How often a backup was put in place.
    """

    def __init__(self, seed: int, folder: Path, count: int = 1, clients: int = 3, backups: int = 1) -> None:
        self.random = random = Random(seed)
        self._shares = Random(f"{seed}: the shares")
        self.network: list[Request | Response] = []
        self.count, self._names, self._ids, self.went_back = count, clients, 0, 0
        self._again = 0.3 if count == 1 else CALM_AGAIN  # each repeat may end a lease: several servers would get nowhere
        self.truth = Everywhere([Truth() for _ in range(count)])
        self._parts = [LAYOUT.part(Range(index, count)) for index in range(count)]
        self._waits = False
        self.clients = {f"w{number}": self._new_client(f"w{number}") for number in range(clients)}
        self._folder, self._often_backed_up = folder, backups
        self._backups: dict[str, Backup] = {}  # those that are being made
        self._complete: Backup | None = None  # the last one
        self._loses_disk = random.random() < 0.15 and count > 1
        settings, choice = some_optimizer(some_settings(random, count > 1), Random(f"{seed}: the optimizer"))
        settings = some_wait(settings, Random(f"{seed}: held replies"))
        settings = some_average(settings, Random(f"{seed}: the average"))
        self._waits = settings.reply_wait > 0
        for client in self.clients.values():
            client.most_batches = self._most_batches
        setup = Setup(some_shares(settings, choice, self._shares), choice, LAYOUT)
        if count == 1:
            setup = replace(setup, unlogged=random.choice([0.0, 0.0, 0.5]), memory_limit=self._some_memory_limit(setup))
        if setup.unlogged:
            self.truth.forgetful.add(0)
        self.machines = [self._new_machine(setup, folder / str(index), index) for index in range(count)]

    def _new_client(self, name: str) -> Client:
        client = Client(name, self.random, self.random.random() < 0.3, self._parts, self.truth, self._shares)
        client.most_batches = self._most_batches
        return client

    @property
    def _most_batches(self) -> int:
        """Of a shard. Paces are known only after some commits."""
        return 16 if self._waits else 4

    def _new_machine(self, setup: Setup, folder: Path, index: int) -> Machine:
        folder.mkdir()
        setup = replace(setup, part=Range(index, self.count))
        return Machine(setup, folder, self.random, self.new_id, self.truth, self.network)

    def _some_memory_limit(self, setup: Setup) -> int:
        """0 for no limit; or room for some workers that overlap, and for fewer copies than a checkpoint of them may need."""
        if self.random.random() < 0.5:
            return 0
        core = setup.new_core("", setup.settings, self.new_id)
        for name in self.clients:
            core.register(name, LAYOUT, 0.0, overlap=True, choice=setup.choice)
        return core.memory.held + self.random.randint(0, 4) * 4 * LAYOUT.size

    def new_id(self) -> str:
        """A new lease id."""
        self._ids += 1
        return f"lease-{self._ids}"

    @property
    def crashes(self) -> int:
        """How often a server's power has failed."""
        return sum(machine.crashes for machine in self.machines)

    @property
    def held(self) -> int:
        """How many replies were held."""
        return sum(machine.held for machine in self.machines)

    # -- the scheduler

    def run(self, steps: int) -> None:
        """Makes a number of steps with faults, then steps without faults until the run is complete, or has stopped because a
        disk is lost."""
        try:
            self.steps(steps * (LONGER if self._waits and self.count == 1 else 1), self.trouble())
            lost = self._loses_disk and self.lose_disk()
            if self._complete and not lost and self.random.random() < 0.9:
                self.go_back(self._complete)
            self.come_to_the_end(lost)
        finally:
            for machine in self.machines:
                machine.close()

    def come_to_the_end(self, lost: bool) -> None:
        """Makes steps without faults until the run is complete, and checks what all ranges have then, unless a disk is lost."""
        self._backups.clear()
        self._again = CALM_AGAIN
        for machine in self.machines:
            machine.calm()
        self._steps_until(lambda: all(client.over for client in self.clients.values()), "the run does not come to its end")
        stopped = [client.stopped for client in self.clients.values() if client.stopped]
        if lost:
            return
        require(not stopped, f"a worker gave up: {stopped}")
        trained = self.machines[0].server.core.ledger.samples_completed
        require(trained == EPOCHS * SAMPLES, "not every sample of every epoch was trained on")
        self.truth.differences_are_explained(set())
        for machine in self.machines:
            machine.crash()
            machine.crash()  # each start writes a checkpoint, and removes old ones
        self.truth.versions_are_explained([machine.server.core.central.version for machine in self.machines])

    def _steps_until(self, done: Callable[[], bool], promise: str) -> None:
        chores = {"checkpoint": 0.3, "save": 1.2, "expire": 0.1}
        often = [choice for name, weight in chores.items() for choice in self._for_each(name, weight)]
        quiet = [*self.peace(), (self.time_passes, 2), *often]
        for _ in range(MAX_CALM_STEPS // 100):
            if done():
                return
            self.steps(100, quiet)
        require(done(), promise)

    def peace(self) -> Choices:
        """The events that always happen, with their weights."""
        often = [choice for name in ("begin", "finish") for choice in self._for_each(name, 6)]
        less = [choice for name in ("take", "write", "sync", "work") for choice in self._for_each(name, 3)]
        return [
            (self.client_acts, 12),
            (self.backups_act, 2 * self._often_backed_up),
            (self.deliver, 12 * self.count),
            *often,
            *less,
            *(self._for_each("tick", 3) if self._waits else ()),
        ]

    def trouble(self) -> Choices:
        """The events that may happen, with their weights."""
        alone = self.count == 1
        return [
            *self.peace(), (self.drop, 0.5 if alone else 0.2), (self.repeat, 1), (self.client_dies, 0.1),
            (self.backup_begins, 0.0 if alone else 0.1 * self._often_backed_up), (self.backup_ends, 0.02), (self.check, 0.5),
            *(choice for name in RARE for choice in self._for_each(name, self._rare(name, alone))),
            *(self._for_each("crash_while_held", 1.0 if alone else 0.05) if self._waits else ()),
            *(self._for_each("end_while_held", 0.5 if alone else 0.05) if self._waits else ()),
        ]  # fmt: skip

    def _rare(self, name: str, alone: bool) -> float:
        """How often something rare happens. If replies wait, most of it is rarer: a restart forgets whom to wait for."""
        rarer = self._waits and name not in ("save", "make_room", "recover")
        return RARE[name][not alone] / (4 if rarer else 1)

    def _for_each(self, name: str, weight: float) -> Choices:
        return [(partial(self._at, machine, name), weight) for machine in self.machines]

    def _at(self, machine: Machine, name: str, *what: Request) -> None:
        """Makes one server do something. Its power may fail meanwhile."""
        crashes, logged = machine.crashes, machine.server.logged
        try:
            getattr(machine, name)(*what)
        except PowerFailure:
            machine.crash()
        if machine.crashes > crashes and not logged:
            self.network.clear()  # without a log, what was said on a connection ends with it
            for client in self.clients.values():
                client.done = False  # what is lost has to be done again

    def steps(self, steps: int, choices: Choices) -> None:
        """Makes a number of steps."""
        actions, weights = [action for action, _ in choices], [weight for _, weight in choices]
        for action in self.random.choices(actions, weights, k=steps):
            action()

    def time_passes(self) -> None:
        """Everywhere, if nothing happens meanwhile."""
        if not self.network:
            for machine in self.machines:
                machine.expire(2)

    def check(self) -> None:
        """Compares the ranges."""
        self.truth.differences_are_explained(self.under_way())

    def under_way(self) -> set[Known]:
        """The commits that not all ranges have answered."""
        return {known for client in self.clients.values() if (known := client.under_way) is not None}

    # -- the network

    def deliver(self) -> None:
        if self.network:
            self.receive(self.network.pop(self.random.randrange(len(self.network))))

    def drop(self) -> None:
        if self.network:
            self.network.pop(self.random.randrange(len(self.network)))

    def repeat(self) -> None:
        if self.network:
            self.network.append(self.random.choice(self.network))

    def receive(self, message: Request | Response) -> None:
        """Hands a message to whom it is for."""
        if isinstance(message, Request):
            self._at(self.machines[message.index], "serve", message)
        elif client := self.clients.get(message.request.worker) or self._backups.get(message.request.worker):
            client.answered(message)

    # -- workers and backups

    def client_acts(self) -> None:
        client = self.random.choice(list(self.clients.values()))
        for request in client.requests():
            again = CALM_AGAIN if self._waits else self._again  # a repeat gets a held reply at once
            if self.random.random() < (again if self._is_in_progress(request) else 0.7):
                self.network.append(request)
        if client.leader is not None and self.random.random() < 0.2:
            lease = {"lease": client.leader.lease_id}
            self.network.append(Request(client.name, 0, "renew", lease, self.random.randrange(client.registered or 1)))

    def _is_in_progress(self, request: Request) -> bool:
        """Whether a request or its response is under way, or a server works on it. If not, it is lost."""
        server = self.machines[request.index].server
        messages = [message if isinstance(message, Request) else message.request for message in self.network]
        waiting = [waiter.response.request for _, waiter in server.log.order._waiters] if server.log is not None else []
        return any(known is request for known in [*messages, *waiting, *chain(*server.asked.values())])

    def client_dies(self) -> None:
        """Kills a worker, perhaps between two ranges. Another takes its place, sometimes under the same name."""
        name = self.random.choice(list(self.clients))
        client = self.clients[name]
        if client.over:
            return
        if client.under_way is not None:
            client.tear()
        del self.clients[name]
        if self.random.random() < 0.5:
            name, self._names = f"w{self._names}", self._names + 1
        self.clients[name] = self._new_client(name)

    def backup_begins(self) -> None:
        if len(self._backups) < 2:
            self._names += 1
            name = f"b{self._names}"
            self._backups[name] = Backup(name, self.count, self._folder / name, self.random, self.truth, self.under_way)

    def backups_act(self) -> None:
        for name, backup in list(self._backups.items()):
            self.network += backup.requests()
            if backup.over:
                self._complete = backup if backup.copies else self._complete
                del self._backups[name]

    def backup_ends(self) -> None:
        """An operator's program dies."""
        if self._backups:
            del self._backups[self.random.choice(list(self._backups))]

    # -- disasters

    def lose_disk(self) -> bool:
        """An operator starts a server with an empty folder. Only then may a worker give up. Returns whether one was lost."""
        machine = self.random.choice(self.machines)
        if machine.server.core.central.initialized:
            machine.lose_disk()
        return bool(self.truth.forgetful)

    def go_back(self, backup: Backup) -> None:
        """An operator stops everything, and starts all servers from a backup, and new workers."""
        self.network.clear()
        self._backups.clear()
        self.clients = {name: self._new_client(name) for name in self.clients}
        for machine, copy in zip(self.machines, backup.copies, strict=True):
            machine.calm()
            machine.go_back(*copy)
        self.truth.goes_back()
        self.went_back += 1
