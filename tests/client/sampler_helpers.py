"""A small data set and loops that train on it, for the tests of shards and samplers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_client import Session, connect
from kit.model import SIZE, Array, Patience, in_background, model
from kit.server import DEADLINE, Live
from torch.utils.data import Dataset

ZERO: Array = np.zeros(SIZE, np.float32)
SAMPLES = 23  # three shards of 10, 10 and 3; batches of 4, 4 and 2, of 4, 4 and 2, and of 3


def settings(**changes: Any) -> Hyperparameters:
    return Hyperparameters(**{"batch_size": 4, "shard_size": 10, "epochs": 1, "seed": 3, **changes})


@contextmanager
def joined(live: Live, name: str) -> Iterator[Session]:
    patience = Patience()
    with connect(live.address, name=name, retry=patience.retry()) as session:
        session.join(model())
        yield session
        patience.run_out()


def train_all(session: Session, batches: Iterable[list[int]]) -> Counter[int]:
    """Commits each batch; returns how often each sample was part of a commit that was applied."""
    seen: Counter[int] = Counter()
    for batch in batches:
        if not session.commit(ZERO).lost:
            seen.update(batch)
    return seen


def ledger(live: Live) -> dict[str, int]:
    """The ledger's counts."""

    def look() -> dict[str, int]:
        ledger = live.core.ledger
        return {
            "pending": ledger.pending,
            "leased": len(ledger.held),
            "completed": ledger.completed,
            "samples_completed": ledger.samples_completed,
            "samples_committed": live.core.samples_committed,
        }

    return live.on_loop(look)


class Numbers(Dataset[int]):
    """The numbers from 0: sample k is k."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def train_each(session: Session, batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """The batches, each committed after it was looked at."""
    for batch in batches:
        yield batch
        session.commit(ZERO)


def read_ahead(batches: Iterable[list[int]], depth: int) -> Iterator[list[int]]:
    """The batches, each fetched `depth` batches before it is handed on, as a loader with worker processes does."""
    iterator = iter(batches)
    fetched: deque[list[int]] = deque()
    more = True
    while more or fetched:
        while more and len(fetched) <= depth:
            batch = next(iterator, None)
            more = batch is not None
            if batch is not None:
                fetched.append(batch)
        if fetched:
            yield fetched.popleft()


def run_to_its_end(work: Any) -> Any:
    """Result of `work`, which must come to an end."""
    return in_background(work).result(DEADLINE)
