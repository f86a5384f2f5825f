"""Which of the batches in a loop's hand a step covers: of a loop that takes one at a time, of a loader, of any other reader."""

from __future__ import annotations

import pytest
from gem_api.errors import InvalidRequest
from gem_client.run.hand import Hand
from gem_client.run.pending_commit import Batch, HeldShard


def dealt(hand: Hand, count: int) -> list[Batch]:
    batches = [Batch([number], HeldShard(0, 1, 0, [])) for number in range(count)]
    for batch in batches:
        hand.add(batch)
    return batches


def one_by_one() -> Hand:
    """The hand of a loop that had a step for its first batch before it asked for another."""
    hand = Hand()
    assert hand.cover(len(dealt(hand, 1)))[1] == []
    return hand


def loaded() -> Hand:
    """The hand of a loop with a loader that says which batches it delivers."""
    hand = Hand()
    hand.loader_tells()
    hand.begin_pass(list)
    return hand


def test_other_readers_are_taken_to_keep_the_order() -> None:
    hand = Hand()
    first, second, third = dealt(hand, 3)
    assert hand.known == []
    assert hand.cover(2) == ([first, second], [])
    assert hand.begin_pass(lambda: [first, second, third]) == [first, second, third]


def test_batches_that_a_loop_takes_one_by_one_and_leaves_out_come_again() -> None:
    hand = one_by_one()
    batches = dealt(hand, 3)
    assert hand.known == batches
    assert hand.cover(2) == ([], batches)


def test_a_step_covers_the_youngest_batch_that_a_loader_delivered_and_none_that_it_read_ahead() -> None:
    hand = loaded()
    first, second, third = dealt(hand, 3)
    hand.deliver()
    hand.deliver()
    assert hand.known == [first, second]
    assert hand.cover(1) == ([second], [first])
    assert hand.begin_pass(list) == [third]


def test_three_steps_in_a_row_may_not_leave_out_as_many() -> None:
    hand = one_by_one()
    for count in (2, 2, 1, 2, 2, 3, 3):  # the third covers all, the sixth leaves out another number
        dealt(hand, count)
        hand.cover(1)
    dealt(hand, 3)
    with pytest.raises(InvalidRequest, match="covers 1 of the 3 batches"):
        hand.cover(1)


def test_the_youngest_are_skipped_if_it_is_known_which_the_loop_has() -> None:
    hand = one_by_one()
    first, *others = dealt(hand, 3)
    with pytest.raises(InvalidRequest, match="can't skip 4 batches: 3 are in hand"):
        hand.skip(4)
    assert hand.skip(2) == others
    assert hand.known == [first]
