"""Which records may be written when, in which order they are acknowledged, and who waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gem_server.core.records import Kind, Record
from gem_server.durability.journal import Journal, Stall
from gem_server.durability.log_file import LogFile
from gem_server.durability.storage import Storage
from gem_server.durability.write_order import Group, WriteOrder

STALL = Stall("the disk is full: free some space", 0.0, 0, 0)


def based(*, serial: int = 1, number: int = 0) -> WriteOrder[str]:
    """A log that follows a checkpoint."""
    order = WriteOrder[str](Journal("run-0001", serial, number))
    assert order.base_written() == []
    return order


def append(order: WriteOrder[str], count: int = 1) -> None:
    for _ in range(count):
        order.journal.append(Record(Kind.ENDED, {"lease": "lease-1", "reason": "left"}))


def taken(order: WriteOrder[str]) -> Group:
    group = order.ready()
    assert group is not None
    return group


def written(order: WriteOrder[str], count: int = 1) -> Group:
    append(order, count)
    group = taken(order)
    order.written(group)
    return group


def numbers(group: Group) -> list[int]:
    return [waiting.number for waiting in group.records]


def test_what_has_collected_is_one_group_and_the_next_may_be_written_while_it_is_synced() -> None:
    order = based(serial=3, number=7)
    assert order.ready() is None
    first, second = written(order, 2), written(order)
    assert (first.serial, first.run_id, first.last) == (3, "run-0001", 9)
    assert (numbers(first), numbers(second)) == ([8, 9], [10])
    assert order.ready() is None


def test_a_group_that_could_not_be_written_is_given_again_with_what_came_since() -> None:
    order = based()
    append(order)
    first = taken(order)
    append(order)
    again = taken(order)
    assert (again.place, numbers(again)) == (first.place, [1, 2])


def test_no_segment_begins_before_everything_of_the_last_one_is_acknowledged() -> None:
    order = based()
    first, second = written(order), written(order)
    order.journal.cut()
    append(order)
    for group in (first, second):
        assert order.ready() is None
        order.acknowledge(group)
    third = taken(order)
    assert (third.serial, numbers(third)) == (2, [3])


def test_records_of_two_segments_are_two_groups() -> None:
    order = based()
    append(order)
    order.journal.cut()
    append(order)
    first = taken(order)
    assert numbers(first) == [1]
    order.written(first)
    assert order.ready() is None
    order.acknowledge(first)
    assert numbers(taken(order)) == [2]


def test_nothing_is_written_before_the_checkpoint_that_it_follows() -> None:
    order = WriteOrder[str](Journal("run-0001"))
    append(order)
    assert order.ready() is None
    order.base_written()
    assert order.ready() is not None


def test_groups_are_acknowledged_in_order() -> None:
    """The sync of a later one may be over first, and says nothing about the others."""
    order = based()
    first, second, third = written(order), written(order), written(order)
    assert [order.is_next(group) for group in (first, second, third)] == [True, False, False]
    order.acknowledge(first)
    assert [order.is_next(group) for group in (second, third)] == [True, False]


def test_a_group_says_what_was_on_the_disk_before() -> None:
    order = based(number=7)
    first, second = written(order), written(order)
    order.acknowledge(first)
    third = written(order)
    assert [group.durable for group in (first, second, third)] == [7, 7, 8]
    assert (order.journal.durable, order.journal.appended) == (8, 10)


def test_who_waits_is_released_by_number_whenever_it_came() -> None:
    order = based()
    first = written(order, 2)
    for number, waiter in ((3, "newer"), (1, "older"), (2, "last")):
        assert order.awaits(number)
        order.wait(number, waiter)
    assert order.acknowledge(first) == ["older", "last"]
    assert [order.awaits(number) for number in (2, 3)] == [False, True]
    assert order.acknowledge(written(order)) == ["newer"]
    assert order.dismiss() == []


def test_from_thetas_first_value_on_everybody_waits_until_it_is_saved() -> None:
    order = WriteOrder[str](Journal("run-0001"))
    assert not order.awaits(0)
    order.begin()
    assert order.awaits(0)
    order.wait(0, "first")
    append(order)
    order.wait(1, "second")
    assert order.base_written() == ["first"]
    assert not order.awaits(0)
    assert order.acknowledge(taken(order)) == ["second"]


def test_who_is_dismissed_is_not_released_later() -> None:
    order = based()
    order.wait(1, "ann")
    order.wait(2, "bob")
    assert order.dismiss() == ["ann", "bob"]
    assert order.acknowledge(written(order, 2)) == []


def test_a_stall_ends_with_the_first_checkpoint_or_a_group_that_is_acknowledged() -> None:
    order = WriteOrder[str](Journal("run-0001"))
    order.journal.stall = STALL
    order.base_written()
    assert order.journal.stall is None
    order.journal.stall = STALL
    order.base_written()
    assert order.journal.stall is STALL
    order.acknowledge(written(order))
    assert order.journal.stall is None


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are looked up in /proc")
def test_no_segment_stays_open(tmp_path: Path) -> None:
    file = LogFile(Storage(), tmp_path)
    for serial in (1, 2):
        file.write(written(based(serial=serial)))
    file.close()
    assert [path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(path)] == []


def test_the_logs_size_counts_each_record_with_its_payload() -> None:
    journal = Journal("run-0001")
    sizes = [journal.size]
    for payload in ([b"abc", b"de"], []):
        journal.append(Record(Kind.ENDED, {"lease": "lease-1", "reason": "left"}, payload))
        sizes.append(journal.size)
    assert sizes[1] - sizes[0] == 5 + sizes[2] - sizes[1] > 5
