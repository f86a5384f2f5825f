"""Several servers, each with a range of θ, under one seeded scheduler. Each has a treacherous disk of its own; workers die
between ranges, ranges die and come back, and checkpoints over all ranges are made meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from gem_api import ranges
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import Range
from gem_server.durability import segment
from gem_server.durability.manifest import Entry
from gem_server.rpc import range_checkpoint
from gem_server.rules import rule_of
from simulation.client import SAMPLES, Request, Response
from simulation.disk import PowerFailure
from simulation.host import Setup
from simulation.ranges_client import RangesClient
from simulation.ranges_coordinator import Coordinator
from simulation.ranges_machine import RangeMachine
from simulation.ranges_truth import Everywhere, RangeTruth
from simulation.runs import EPOCHS, some_optimizer, some_settings
from simulation.scheduler import MAX_CALM_STEPS, Choices, Scheduler
from simulation.server import later
from simulation.truth import require

UNIT = 4  # elements: a range begins at a multiple of this here
LAYOUT = Layout.of({"w": (3, 2), "b": (7,)})  # the ranges cut both tensors
MAX_TRIES = 10  # of a checkpoint over all ranges, once all is calm


@contextmanager
def small() -> Iterator[None]:
    """Ranges and files are small inside a `with` block, and nothing sleeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "UNIT", UNIT)
        patch.setattr(segment, "_ALLOCATION", 4096)
        patch.setattr(range_checkpoint, "asyncio", SimpleNamespace(sleep=lambda seconds: _later()))
        yield


async def _later() -> None:
    await later()


class RangesWorld(Scheduler):
    """One simulation of several ranges. Use it inside `small`.

    Args:
        seed: Decides everything.
        folder: An empty folder, for the disks.
        clients: Workers at first.

    Attributes:
        machines: The servers, by range.
        truth: What they have promised together.
        clients: The workers, by name.
    """

    def __init__(self, seed: int, folder: Path, clients: int = 3) -> None:
        super().__init__(seed)
        random, self._folder, self._names = self.random, folder, clients
        self.count = 2 + seed % 2
        self.truth = Everywhere([RangeTruth() for _ in range(self.count)])
        self._parts = [LAYOUT.part(Range(index, self.count)) for index in range(self.count)]
        self.clients = {f"w{number}": self._new_client(f"w{number}") for number in range(clients)}
        self._coordinators: dict[str, Coordinator] = {}
        self._loses_disk = random.random() < 0.15
        settings, choice = some_optimizer(_some_settings(random), Random(f"{seed}: the optimizer"))
        self.machines: list[RangeMachine] = []
        for index in range(self.count):
            (home := folder / str(index)).mkdir()
            setup = Setup(settings, choice, LAYOUT, Range(index, self.count))
            machine = RangeMachine(setup, home, random, self.new_id, self.truth.ranges[index], self.network)
            machine.everywhere = self.truth
            self.machines.append(machine)

    def _new_client(self, name: str) -> RangesClient:
        return RangesClient(name, self.random, self.random.random() < 0.3, self._parts, self.truth)

    @property
    def crashes(self) -> int:
        """How often a server's power has failed."""
        return sum(machine.crashes for machine in self.machines)

    # -- the scheduler

    def run(self, steps: int) -> None:
        """Makes a number of steps with faults, then steps without faults until the run is complete, or has stopped because a
        disk is lost."""
        try:
            self.steps(steps, self.trouble())
            if self._loses_disk:
                self.disk_is_lost()
            self.come_to_the_end()
        finally:
            for machine in self.machines:
                machine.close()

    def come_to_the_end(self) -> None:
        """Makes steps without faults until the run is complete, and checks what all ranges have then."""
        self._coordinators.clear()
        for machine in self.machines:
            machine.calm()
        self._steps_until(lambda: all(client.over for client in self.clients.values()), "the run does not come to its end")
        stopped = [client.stopped for client in self.clients.values() if client.stopped]
        if self.truth.wiped:
            return
        require(not stopped, f"a worker gave up: {stopped}")
        trained = self.machines[0].server.core.ledger.samples_completed
        require(trained == EPOCHS * SAMPLES, "not every sample of every epoch was trained on")
        entries = self._checkpoint_at_rest()
        self.truth.differences_are_explained(set())
        for machine in self.machines:
            require(not machine.server.hold.waiting, "a commit is held back for ever")
            machine.crash()
            machine.crash()  # each start writes a checkpoint, and removes old ones
        self.truth.versions_are_explained([machine.server.core.central.version for machine in self.machines])
        self.truth.manifest_stands(entries)

    def _steps_until(self, done: Callable[[], bool], promise: str) -> None:
        chores = {"checkpoint": 0.3, "save": 1.2, "expire": 0.1}
        often = [choice for name, weight in chores.items() for choice in self._for_each(name, weight)]
        quiet = [*self.peace(), (self.time_passes, 2), *often]
        for _ in range(MAX_CALM_STEPS // 100):
            if done():
                return
            self.steps(100, quiet)
        require(done(), promise)

    def _checkpoint_at_rest(self) -> list[Entry]:
        """Makes a checkpoint over all ranges; commits of dead workers may let one fail."""
        for number in range(MAX_TRIES):
            self._steps_until(lambda: not any(machine.server.hold.active for machine in self.machines), "a hold does not end")
            before = self.truth.manifests
            self._coordinators[f"end{number}"] = coordinator = self._new_coordinator(f"end{number}")
            self._steps_until(lambda: coordinator.over, "a checkpoint over all ranges does not come to its end")  # noqa: B023
            if self.truth.manifests > before:
                self._coordinators.clear()
                return coordinator.entries
        raise AssertionError("no checkpoint over all ranges succeeds, though all is calm")

    def _for_each(self, name: str, weight: float) -> Choices:
        return [(partial(self._at, index, name), weight) for index in range(self.count)]

    def _at(self, index: int, name: str) -> None:
        """Makes one server do something. Its power may fail meanwhile."""
        machine = self.machines[index]
        try:
            getattr(machine, name)()
        except PowerFailure:
            machine.crash()

    def peace(self) -> Choices:
        """The events that always happen, with their weights."""
        often = [choice for name in ("begin", "finish") for choice in self._for_each(name, 6)]
        less = [choice for name in ("take", "write", "sync", "work") for choice in self._for_each(name, 3)]
        return [(self.client_acts, 12), (self.coordinator_acts, 2), (self.deliver, 12 * self.count), *often, *less]

    def trouble(self) -> Choices:
        """The events that may happen, with their weights."""
        rare = {
            "checkpoint": 0.2, "save": 1.2, "expire": 0.05, "crash": 0.02, "crash_soon": 0.02, "fill_disk": 0.02,
            "make_room": 0.1, "fall_sick": 0.01, "recover": 0.1,
        }  # fmt: skip
        return [
            *self.peace(), (self.drop, 0.2), (self.repeat, 1), (self.client_dies, 0.1), (self.coordinator_begins, 0.1),
            (self.coordinator_dies, 0.02), (self.check, 0.5),
            *(choice for name, weight in rare.items() for choice in self._for_each(name, weight)),
        ]  # fmt: skip

    def step(self, action: Callable[[], None]) -> None:
        action()
        for machine in self.machines:
            machine.answer_what_is_durable()

    def time_passes(self) -> None:
        """Everywhere, if nothing happens meanwhile."""
        if not self.network:
            for machine in self.machines:
                machine.expire(2)

    def check(self) -> None:
        """Compares the ranges."""
        under_way = {known for client in self.clients.values() if (known := client.under_way) is not None}
        self.truth.differences_are_explained(under_way)

    # -- workers, coordinators and the network

    def client_acts(self) -> None:
        client = self.random.choice(list(self.clients.values()))
        for request in client.requests():
            if self.random.random() < (0.02 if self._is_in_progress(request) else 0.7):
                self.network.append(request)
        if client.lead is not None and self.random.random() < 0.2:
            lease = {"lease": client.lead.lease_id}
            self.network.append(Request(client.name, 0, "renew", lease, self.random.randrange(client.registered or 1)))

    def _is_in_progress(self, request: Request) -> bool:
        """Whether a request or its response is under way, or a server works on it. If not, it is lost."""
        server = self.machines[request.index].server
        messages = [message if isinstance(message, Request) else message.request for message in self.network]
        answers = [response.request for _, response, _ in server.answers]
        return any(known is request for known in [*messages, *answers, *chain(*server.asked.values())])

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

    def coordinator_begins(self) -> None:
        if len(self._coordinators) < 2:
            self._names += 1
            name = f"c{self._names}"
            self._coordinators[name] = self._new_coordinator(name)

    def _new_coordinator(self, name: str) -> Coordinator:
        return Coordinator(name, self.count, self.random, self.truth)

    def coordinator_acts(self) -> None:
        for name, coordinator in list(self._coordinators.items()):
            self.network += coordinator.requests()
            if coordinator.over:
                del self._coordinators[name]

    def coordinator_dies(self) -> None:
        if self._coordinators:
            del self._coordinators[self.random.choice(list(self._coordinators))]

    def receive(self, message: Request | Response) -> None:
        if isinstance(message, Request):
            machine = self.machines[message.index]
            try:
                machine.serve(message)
            except PowerFailure:
                machine.crash()
        elif client := self.clients.get(message.request.worker) or self._coordinators.get(message.request.worker):
            client.answered(message)

    # -- disasters

    def disk_is_lost(self) -> None:
        """An operator starts a server with an empty folder. Only then may a worker give up."""
        machine = self.random.choice(self.machines)
        if machine.server.core.central.initialized:
            machine.lose_disk()


def _some_settings(random: Random) -> Hyperparameters:
    """Settings of a run whose rule treats each parameter by itself."""
    while not rule_of(settings := some_settings(random)).by_element:
        pass
    return settings
