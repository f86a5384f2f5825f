"""An operator's program that makes a checkpoint over all ranges: begin, create and manifest on each, the lead last."""

from __future__ import annotations

from random import Random
from typing import Any

from gem_server.durability.checkpointer import Written
from gem_server.durability.manifest import Entry
from simulation.client import Request, Response
from simulation.everywhere import Everywhere


class Coordinator:
    """One checkpoint over all ranges.

    Args:
        name: Where the responses go.
        ranges: How many there are.
        random: Decides whether requests are sent again.
        truth: Is told of the manifest that is written.

    Attributes:
        over: Whether it is done, or has failed.
        entries: The checkpoints of all ranges, once the manifest is written.
    """

    def __init__(self, name: str, ranges: int, random: Random, truth: Everywhere) -> None:
        self.name = name
        self.over = False
        self.entries: list[Entry] = []
        self._ranges = range(ranges)
        self._random = random
        self._truth = truth
        self._step = 0
        self._waiting: dict[int, Request] = {}
        self._sent: set[tuple[int, int]] = set()
        self._values: dict[int, Any] = {}
        self._cut: dict[str, int] = {}
        self._ask("begin", self._ranges, {})

    def _ask(self, kind: str, ranges: range, fields: dict[str, Any]) -> None:
        self._step += 1
        self._values = {}
        self._waiting = {index: Request(self.name, self._step, kind, fields, index) for index in ranges}

    def requests(self) -> list[Request]:
        """The requests to send now. Each is sent once, and seldom again."""
        new = [
            request for index, request in self._waiting.items()
            if (self._step, index) not in self._sent or self._random.random() < 0.02
        ]  # fmt: skip
        self._sent |= {(self._step, request.index) for request in new}
        return new

    def answered(self, response: Response) -> None:
        request = response.request
        if self._waiting.get(request.index) is not request or self.over:
            return
        if response.error is not None:
            self.over = True  # an operator may begin another
            return
        del self._waiting[request.index]
        self._values[request.index] = response.value
        if self.all_answered(request):
            getattr(self, f"_after_{request.kind}")(request)

    def all_answered(self, request: Request) -> bool:
        """Whether the step is over."""
        return not self._waiting

    def _after_begin(self, request: Request) -> None:
        leases = {lease_id for taken in self._values.values() for lease_id in taken}
        self._cut = {lease_id: self.last([taken.get(lease_id, 0) for taken in self._values.values()]) for lease_id in leases}
        self._ask("create", self._ranges, {"cut": self._cut})

    def last(self, taken: list[int]) -> int:
        """The last commit of a lease that the checkpoint has, from the last that each range has taken."""
        return max(taken)

    def _after_create(self, request: Request) -> None:
        written: list[Written] = [self._values[index] for index in self._ranges]
        self.entries = [Entry(f"range{index}", str(w.path), w.version, w.sha256.hex()) for index, w in enumerate(written)]
        self._ask("manifest", self._ranges[1:], {"entries": self.entries, "cut": self._cut})

    def _after_manifest(self, request: Request) -> None:
        if request.index:
            self._ask("manifest", self._ranges[:1], {"entries": self.entries, "cut": self._cut})
            return
        self.over = True
        self._truth.manifest_is_written(self.entries, self._cut)
