"""The batches that a loop has in hand, and which of them a step covers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from gem_api.errors import InvalidRequest

from gem_client.run.pending_commit import Batch

log = logging.getLogger("gem_client")

ADVICE = (
    "call the Optimizer's step() after each backward(); if the loop accumulates the gradients of k batches, make it with "
    "batches_per_step=k; to leave a batch out on purpose, call skip(); to read ahead, or to leave the loader early, use one "
    "made by ShardSampler.loader()"
)
MAX_TIMES_WITHOUT_STEP = 3  # a batch that the loop got so often without a step will never get one


class Hand:
    """The batches that were handed out and that no step and no skip covers yet. Call it under the lock of `Shards`.

    It is certain which of them the loop has in two cases: the loop takes one batch at a time, or a loader says which batches it
    has delivered. Any other reader may have read ahead.

    Attributes:
        ended: Whether this pass hands out no more batches.
    """

    def __init__(self) -> None:
        self.ended = False
        self._batches: list[Batch] = []
        self._delivered: int | None = None  # those that reached the loop; None if the loader does not report it
        self._will_tell = False  # whether the next pass belongs to a loader that calls `deliver`
        self._one_by_one = False  # whether the loop had a step for all of them before it asked for more
        self._asked_by = 0  # the thread that asked for the last batch
        self._left_out = (0, 0)  # batches that the last step did not cover, and how many steps in a row as many
        self._warned = False

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def certain(self) -> bool:
        """Whether it is known which of the batches handed out the loop has."""
        return self._delivered is not None or self._one_by_one

    @property
    def known(self) -> list[Batch]:
        """The batches that the loop has, the youngest last; none if that is not known."""
        return self._batches[: self._visible] if self.certain or self.ended else []

    @property
    def _visible(self) -> int:
        """Upper bound of the batches that the loop has."""
        return len(self._batches) if self._delivered is None else self._delivered

    def add(self, batch: Batch) -> None:
        """The loop, or its reader, gets a batch."""
        self._batches.append(batch)
        self._asked_by = threading.get_ident()

    def loader_tells(self) -> None:
        """Announces that the next pass belongs to a loader that calls `deliver`."""
        self._will_tell = True

    def deliver(self) -> None:
        """The loader gives the loop the next batch."""
        if self._delivered is not None:
            self._delivered += 1

    def begin_pass(self, take_back_all: Callable[[], list[Batch]]) -> list[Batch]:
        """Empties the hand for another pass. Returns the batches that come again; those of `take_back_all` if it is not known
        which of them got a step. Raises InvalidRequest if a batch came too often."""
        if self.certain:  # the loop had the first ones; a loader has read the others ahead
            had, unseen = self._batches[: self._visible], self._batches[self._visible :]
        else:
            had, unseen = take_back_all() if self._batches else [], []
        if had:
            self._warn("%d batches got no step, and come again", len(had))
        _note_without_step(had)
        self._batches.clear()
        self._delivered = 0 if self._will_tell else None
        self._will_tell = self._one_by_one = self.ended = False
        return [*had, *unseen]

    def cover(self, batches: int) -> tuple[list[Batch], list[Batch]]:
        """Takes the batches that a step on `batches` batches covers. Returns them, and those that come again.

        If the loop has more batches than that, it left some out and did not say which; those come again. With a loader that
        calls `deliver`, the step certainly covers the youngest batch, because the loop had it. Otherwise no batch is certain,
        because the loop may have begun to read ahead. Raises InvalidRequest if it leaves out as many at each step.
        """
        again: list[Batch] = []
        if not self.certain:
            covered = self._take(0, batches)
        elif self._visible <= batches:
            covered = self._take(0, self._visible)
            self._left_out = (0, 0)
        else:
            keep = 0 if self._delivered is None else 1
            self._note_left_out(self._visible, batches)
            again = self._take(0, self._visible - keep)
            _note_without_step(again)
            covered = self._take(0, keep)
        self._note_balance()
        return covered, again

    def skip(self, batches: int) -> list[Batch]:
        """Takes the youngest `batches` batches, and returns them. Raises InvalidRequest if the loop has fewer."""
        if not 0 < batches <= self._visible:
            raise InvalidRequest(
                f"can't skip {batches} batches: {self._visible} are in hand. Skip each one once, instead of committing it"
            )
        skipped = self._take(self._visible - batches if self.certain else 0, batches)
        self._note_balance()
        return skipped

    def _take(self, first: int, count: int) -> list[Batch]:
        taken = self._batches[first : first + count]
        del self._batches[first : first + count]
        if self._delivered is not None:
            self._delivered -= len(taken)
        return taken

    def _note_balance(self) -> None:
        """Notes whether the loop takes one batch at a time: it covered all batches before it asked for another one, in the same
        thread. (Another thread that reads ahead might just have been slow.)"""
        if not self._batches and not self.ended and self._asked_by == threading.get_ident():
            self._one_by_one = True

    def _note_left_out(self, had: int, covered: int) -> None:
        """Warns that a step leaves out batches, and raises InvalidRequest if each one leaves out as many."""
        before, times = self._left_out
        self._left_out = had - covered, times + 1 if had - covered == before else 1
        if self._left_out[1] == MAX_TIMES_WITHOUT_STEP:
            raise InvalidRequest(f"each step covers {covered} of the {had} batches that the loop had for it: {ADVICE}")
        self._warn("a step covers %d of the %d batches that the loop had for it; the others come again", covered, had)

    def _warn(self, what: str, *numbers: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(what + ". " + ADVICE[0].upper() + ADVICE[1:], *numbers)


def _note_without_step(batches: Iterable[Batch]) -> None:
    """Counts that the loop had these batches and made no step. Raises InvalidRequest for one that it had too often."""
    for batch in batches:
        batch.times_without_step += 1
        if batch.times_without_step == MAX_TIMES_WITHOUT_STEP:
            raise InvalidRequest(f"a batch came {MAX_TIMES_WITHOUT_STEP} times and never got a step: {ADVICE}")
