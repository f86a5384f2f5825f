"""What all simulations share: chance, and a network that delays, drops, repeats and reorders."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from simulation.client import Request, Response

MAX_CALM_STEPS = 20_000
Choices = list[tuple[Callable[[], None], float]]  # actions, with their weights


class Scheduler:
    """Does one thing after another, in an order that the seed decides.

    Args:
        seed: Decides everything.

    Attributes:
        random: The only source of chance.
        network: The messages that are under way.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.network: list[Request | Response] = []
        self._ids = 0

    def steps(self, steps: int, choices: Choices) -> None:
        """Makes a number of steps."""
        actions, weights = [action for action, _ in choices], [weight for _, weight in choices]
        for action in self.random.choices(actions, weights, k=steps):
            self.step(action)

    def step(self, action: Callable[[], None]) -> None:
        """Makes one step."""
        action()

    def receive(self, message: Request | Response) -> None:
        """Hands a message to whom it is for."""
        raise NotImplementedError

    def deliver(self) -> None:
        if self.network:
            self.receive(self.network.pop(self.random.randrange(len(self.network))))

    def drop(self) -> None:
        if self.network:
            self.network.pop(self.random.randrange(len(self.network)))

    def repeat(self) -> None:
        if self.network:
            self.network.append(self.random.choice(self.network))

    def new_id(self) -> str:
        """A new lease id."""
        self._ids += 1
        return f"lease-{self._ids}"
