"""The links of a session to its servers, without servers: results, which error counts, and interruptions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from gem_api.errors import (
    GemError,
    InvalidRequest,
    LeaseEnded,
    NonFiniteGradient,
    Overloaded,
    Quarantined,
    ServerUnavailable,
)
from gem_api.wire import FLOAT32
from gem_client import Retry
from gem_client.run.link import Caller, Link
from gem_client.run.links import Links
from kit.server import DEADLINE, wait_until

PARAMETERS = 20_000
PAUSES = Retry(first_pause=1000.0, longest_pause=1000.0, give_up_after=1e9)


class Connection:
    """A connection that only says whether it is open."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open = True
        self.lane = None

    def drop_stream(self) -> None: ...

    def stop(self) -> None: ...

    def abort(self) -> None:
        self.open = False

    close = abort


def links(count: int) -> Links:
    made = Links("range-0", Caller("worker", Connection, PAUSES, False, FLOAT32, FLOAT32))  # type: ignore[arg-type]
    made.arrange([f"range-{index}" for index in range(1, count)], PARAMETERS)
    return made


def is_open(link: Link) -> bool:
    return link.connection.open  # type: ignore[attr-defined,no-any-return]


def raising(errors: dict[int, BaseException]) -> Callable[[Link], int]:
    def work(link: Link) -> int:
        if link.part.index in errors:
            raise errors[link.part.index]
        return link.part.index

    return work


def test_results_come_in_the_order_of_the_ranges() -> None:
    threads: dict[int, int] = {}

    def work(link: Link) -> str:
        threads[link.part.index] = threading.get_ident()
        return link.address

    made = links(3)
    assert made.at_once(work) == ["range-0", "range-1", "range-2"]
    assert threads[0] == threading.get_ident()
    assert len(set(threads.values())) == 3
    made.close()


ENDED, REPLACED = LeaseEnded("", "expired"), LeaseEnded("", "replaced")
REJECTED, QUARANTINED, GONE = NonFiniteGradient(), Quarantined(), ServerUnavailable()


@pytest.mark.parametrize(
    ("errors", "counts"),
    [
        ({0: GONE, 1: ENDED, 2: REJECTED}, ENDED),
        ({0: ENDED, 2: REPLACED}, REPLACED),
        ({0: GONE, 2: REJECTED}, REJECTED),
        ({1: Overloaded(), 2: QUARANTINED}, QUARANTINED),
        ({1: GONE, 2: (invalid := InvalidRequest())}, invalid),
        ({0: ENDED, 1: (bug := ZeroDivisionError())}, bug),
        ({1: GONE}, GONE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_error_that_says_what_to_do_next_counts(errors: dict[int, BaseException], counts: BaseException) -> None:
    made = links(3)
    with pytest.raises(type(counts)) as raised:
        made.at_once(raising(errors))
    assert raised.value is counts
    assert made.at_once(raising({})) == [0, 1, 2]
    made.close()


def test_an_error_does_not_come_before_the_others_have_ended() -> None:
    made, finish, finished = links(2), threading.Event(), threading.Event()

    def work(link: Link) -> None:
        if link.part.leads:
            finish.set()
            raise GONE
        assert finish.wait(DEADLINE)
        finished.set()

    with pytest.raises(ServerUnavailable):
        made.at_once(work)
    assert finished.is_set()
    made.close()


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interruption_ends_what_the_other_threads_do(interrupts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a second one comes while the first is dealt with: the next use of the links sees to the rest."""
    made, trying = links(3), threading.Barrier(3)
    former, ended = made.peers, list[GemError]()

    def attempt() -> Any:
        trying.wait(DEADLINE)
        raise ServerUnavailable

    def work(link: Link) -> None:
        if link.part.leads:
            trying.wait(DEADLINE)  # the others have made an attempt each, and pause
            raise KeyboardInterrupt
        try:
            link.call(attempt)
        except GemError as error:
            ended.append(error)

    with monkeypatch.context() as again:
        if interrupts == 2:
            again.setattr(former[0], "wait", raising({1: KeyboardInterrupt()}).__get__(former[0]))
        with pytest.raises(KeyboardInterrupt):
            made.at_once(work)
    assert made.at_once(lambda link: link.address) == ["range-0", "range-1", "range-2"]
    wait_until(lambda: len(ended) == 2, "the threads to end")
    assert not any(map(is_open, former))
    assert all(map(is_open, made))
    assert not {id(link) for link in former} & {id(link) for link in made}
    made.close()


def test_links_to_servers_that_stay_are_kept() -> None:
    made = links(3)
    before = made.peers
    made.arrange(["range-1", "elsewhere"], PARAMETERS)
    assert made.peers[0] is before[0]
    assert [link.address for link in made] == ["range-0", "range-1", "elsewhere"]
    assert not is_open(before[1])
    made.arrange([], PARAMETERS)
    assert (made.peers, made.leader.part.whole, is_open(before[0])) == ([], True, False)
