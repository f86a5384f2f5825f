"""The whole core under a seeded scheduler: a server on a treacherous disk, a network that delays, drops, repeats and
reorders, workers that die. One thread, no sockets, no time but the one told here. The same seed does the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from gem_api.layout import Layout
from simulation.client import SAMPLES, SIZE, Client, Request, Response
from simulation.disk import PowerFailure
from simulation.host import Setup
from simulation.machine import Machine
from simulation.runs import EPOCHS, some_optimizer, some_settings
from simulation.scheduler import MAX_CALM_STEPS, Choices, Scheduler
from simulation.truth import Truth, require

LAYOUT = Layout.of({"w": (SIZE,)})


class World(Scheduler):
    """One simulation.

    Args:
        seed: Decides everything.
        folder: An empty folder, the disk's.
        clients: Workers at first.

    Attributes:
        machine: The server.
        clients: The workers, by name.
    """

    def __init__(self, seed: int, folder: Path, clients: int = 3) -> None:
        super().__init__(seed)
        random = self.random
        self._names = clients
        unlogged = 0.5 if random.random() < 0.3 else 0.0  # how often a start keeps no log
        self.clients = {f"w{number}": Client(f"w{number}", random, random.random() < 0.3) for number in range(clients)}
        drawn = some_settings(random)
        # Drawn apart, so that the other draws stay as they are.
        settings, choice = some_optimizer(drawn, Random(f"{seed}: the optimizer"))
        setup = Setup(settings, choice, LAYOUT, unlogged=unlogged)
        setup = replace(setup, memory_limit=self._some_memory_limit(setup))
        self.machine = Machine(setup, folder, random, self.new_id, Truth(), self.network)

    @property
    def crashes(self) -> int:
        """How often the server's power has failed."""
        return self.machine.crashes

    # -- the scheduler

    def run(self, steps: int) -> None:
        """Makes a number of steps with faults, then steps without faults until the run is complete."""
        try:
            self._run(steps)
        finally:
            self.machine.close()

    def _run(self, steps: int) -> None:
        machine = self.machine
        self.steps(steps, self.trouble())
        machine.calm()
        quiet = [*self.peace(), (machine.checkpoint, 0.2), (machine.save, 0.6), (machine.expire, 0.05)]
        for _ in range(MAX_CALM_STEPS // 100):
            self.steps(100, quiet)
            if all(client.done for client in self.clients.values()):
                break
        require(all(client.done for client in self.clients.values()), "the run does not come to its end")
        ledger = machine.server.core.ledger
        require(ledger.samples_completed == EPOCHS * SAMPLES, "not every sample of every epoch was trained on")
        self.crash()

    def peace(self) -> Choices:
        """The events that always happen, with their weights."""
        machine = self.machine
        return [
            (self.client_acts, 8), (self.deliver, 12), (machine.begin, 6), (machine.finish, 6), (machine.take, 3),
            (machine.write, 3), (machine.sync, 3),
        ]  # fmt: skip

    def trouble(self) -> Choices:
        """The events that may happen, with their weights."""
        machine = self.machine
        return [
            *self.peace(), (self.drop, 0.5), (self.repeat, 0.8), (machine.checkpoint, 0.5), (machine.save, 1.5),
            (machine.expire, 0.2), (self.crash, 0.2), (machine.crash_soon, 0.2), (machine.fill_disk, 0.1),
            (machine.make_room, 0.5), (self.client_dies, 0.1), (machine.fall_sick, 0.1), (machine.recover, 0.2),
        ]  # fmt: skip

    def step(self, action: Callable[[], None]) -> None:
        try:
            action()
        except PowerFailure:
            self.crash()
        self.machine.answer_what_is_durable()

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

    def receive(self, message: Request | Response) -> None:
        if isinstance(message, Request):
            self.machine.serve(message)
        elif message.request.worker in self.clients:
            self.clients[message.request.worker].answered(message)

    # -- disasters

    def crash(self) -> None:
        """The power fails, and the server restarts, perhaps more than once."""
        if not self.machine.server.logged:
            for client in self.clients.values():
                client.done = False  # what is lost has to be done again
        self.machine.crash()

    def _some_memory_limit(self, setup: Setup) -> int:
        """0 for no limit; or room for some workers that overlap, and for fewer copies than a checkpoint of them may need."""
        if self.random.random() < 0.5:
            return 0
        core = setup.new_core("", setup.settings, self.new_id)
        for name in self.clients:
            core.register(name, LAYOUT, 0.0, overlap=True, choice=setup.choice)
        return core.memory.held + self.random.randint(0, 4) * 4 * SIZE
