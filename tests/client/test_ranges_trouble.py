"""A session with several servers when one of them goes, comes back, ends the lease, rejects its part or holds the wrong one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from client.conftest import Transport
from client.range_helpers import GRADIENT, SIZE, Ranges, gradients, large_model, ranges, train
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, NonFiniteGradient, SettingsDiffer, TransportError, connect
from gem_client.run.link import Link
from gem_client.torch import Optimizer
from kit.model import PLAIN, Array, Patience, ended, expire_all, in_background, outcomes, version, workers
from kit.raw_client import apply_thread_held
from kit.regions import linux_only
from kit.server import DEADLINE, serving, wait_until
from torch import nn

GEM = Hyperparameters(rule="gem")
SECOND = slice(4096, SIZE)  # range 1 of 2


def in_memory(index: int) -> Any:
    """A case for a range, through shared memory."""
    return pytest.param(index, "memory", marks=linux_only)


def poisoned(part: slice) -> Array:
    gradient = GRADIENT.copy()
    gradient[part.start] = np.nan
    return gradient


def threads_of_ranges() -> int:
    return sum(thread.name == "gem-session-range" for thread in threading.enumerate())


# -- a range that goes and comes back


@pytest.mark.parametrize(("index", "transport"), [(0, "grpc"), in_memory(1)], indirect=["transport"])
def test_a_range_that_comes_back_goes_on_with_the_same_bits(index: int, transport: Transport, tmp_path: Path) -> None:
    with ranges(tmp_path / "one", 1, GEM) as run, connect(run.address) as session:
        expected = train(session, session.join(large_model()))
    patience = Patience()
    with (
        ranges(tmp_path / "two", 2, GEM, **transport.of_ranges) as run,
        connect(run.address, retry=patience.retry()) as session,
    ):
        theta = session.join(large_model())
        for step, gradient in zip(range(5), gradients(), strict=False):
            if step != 2:
                theta = session.commit(gradient(theta), samples=4).theta
                continue
            run.lives[index].stop()
            waiting = in_background(lambda: session.commit(gradient(theta), samples=4))  # noqa: B023
            wait_until(lambda: patience.pauses, "the session to try again")
            wait_until(lambda: version(run.lives[1 - index]) == 3, "the other range to apply its part")
            assert not waiting.done()
            run.back(index)
            answer = waiting.result(DEADLINE)
            assert (answer.lost, answer.version, session.generation) == (False, 3, 1)
            theta = answer.theta
        np.testing.assert_array_equal(run.theta, expected)
        np.testing.assert_array_equal(theta, expected)
        assert session.transport == transport.name
        assert run.each(outcomes) == [{"applied": 5}] * 2


def test_a_session_that_gave_up_on_one_range_recovers_when_it_is_back(tmp_path: Path) -> None:
    patience = Patience()
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address, retry=patience.retry()) as session:
        session.join(large_model())
        session.commit(GRADIENT)
        run.lives[1].stop()
        patience.run_out()
        with pytest.raises(TransportError):
            session.commit(GRADIENT)
        with pytest.raises(TransportError):
            session.pull()
        patience.renew()
        run.back(1)
        assert session.commit(GRADIENT).lost  # whether the last one reached range 0 was not known
        assert not session.commit(GRADIENT).lost
        assert run.each(version) == [3, 2]
        np.testing.assert_array_equal(session.theta, run.theta)


def test_join_gives_up_on_a_range_that_is_not_there_and_leaves_the_others(tmp_path: Path) -> None:
    patience = Patience()
    patience.run_out()
    with ranges(tmp_path, 3, PLAIN) as run, connect(run.address, retry=patience.retry()) as session:
        run.lives[1].stop()
        with pytest.raises(TransportError, match=run.lives[1].address):
            session.join(large_model())
        assert workers(run.lives[0]) == workers(run.lives[2]) == []
        patience.renew()
        run.back(1)
        session.join(large_model())
        assert session.commit(GRADIENT).version == 1


def test_a_session_is_closed_while_a_range_does_not_answer(tmp_path: Path) -> None:
    with ranges(tmp_path, 2, PLAIN) as run:
        session = connect(run.address)
        session.join(large_model())
        with apply_thread_held(run.lives[1]):
            waiting = in_background(lambda: session.commit(GRADIENT))
            wait_until(lambda: version(run.lives[0]) == 1, "range 0 to apply its part")
            session.__exit__(RuntimeError, RuntimeError(), None)
            with pytest.raises(InvalidRequest, match="closed"):
                waiting.result(DEADLINE)
        assert run.each(workers) == [[], []]


# -- leases


@pytest.mark.parametrize(("index", "transport"), [in_memory(0), (1, "tcp")], indirect=["transport"])
def test_a_lease_that_ended_on_one_range_is_taken_anew_on_all(index: int, transport: Transport, tmp_path: Path) -> None:
    with (
        ranges(tmp_path, 2, PLAIN, **transport.of_ranges) as run,
        connect(run.address) as session,
    ):
        session.join(large_model())
        session.commit(GRADIENT)
        first = session._member.registration.lease_id
        expire_all(run.lives[index])
        answer = session.commit(GRADIENT)
        assert (answer.lost, session.generation) == (True, 2)
        second = session._member.registration.lease_id
        assert second != first
        assert run.each(lambda live: live.on_loop(lambda: list(live.core.leases.live))) == [[second]] * 2
        np.testing.assert_array_equal(answer.theta, run.theta)
        answer = session.commit(GRADIENT)
        assert not answer.lost
        assert session.transport == transport.name
        np.testing.assert_array_equal(answer.theta, run.theta)


# -- rejected parts


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_part_that_is_rejected_uses_up_the_number_and_the_next_commit_works(transport: Transport, tmp_path: Path) -> None:
    with (
        ranges(tmp_path, 2, PLAIN, **transport.of_ranges) as run,
        connect(run.address) as session,
    ):
        session.join(large_model())
        session.commit(GRADIENT)
        with pytest.raises(NonFiniteGradient):
            session.commit(poisoned(SECOND))
        assert run.each(version) == [2, 1]
        assert session.base == (2, 1, (1,))  # of the θ that range 0 has sent, and the one that range 1 had
        np.testing.assert_array_equal(session.theta, run.theta)
        answer = session.commit(GRADIENT)
        assert (answer.version, answer.staleness, answer.lost, session.generation) == (3, 0, False, 1)
        with pytest.raises(NonFiniteGradient):
            session.commit(poisoned(slice(0, 4096)))
        with pytest.raises(NonFiniteGradient):
            session.commit(np.full(SIZE, np.nan, np.float32))
        session.commit(GRADIENT)
        assert run.each(version) == [4, 4]
        assert session.steps_done == 4
        np.testing.assert_array_equal(session.theta, run.theta)
        assert session.transport == transport.name


def test_an_optimizer_takes_what_the_other_ranges_have_applied(tmp_path: Path) -> None:
    """Its next gradient is computed on the new θ of those, and is said to be."""
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address) as session:
        parameter = nn.Parameter(torch.ones(SIZE))
        optimizer = Optimizer([("x", parameter)], session)
        parameter.grad = torch.full((SIZE,), 0.5)
        optimizer.step()
        parameter.grad = torch.from_numpy(poisoned(SECOND))
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        np.testing.assert_array_equal(parameter.detach().numpy(), run.theta)
        parameter.grad = torch.full((SIZE,), 0.5)
        optimizer.step()
        assert optimizer.answer is not None
        assert (optimizer.answer.version, optimizer.answer.staleness) == (3, 0)
        np.testing.assert_array_equal(parameter.detach().numpy(), run.theta)


# -- servers that do not fit


@pytest.mark.parametrize("lease_is_there", [True, False])
def test_an_older_copy_of_the_folder_of_a_range_is_refused(lease_is_there: bool, tmp_path: Path) -> None:
    older = tmp_path / "older"
    with ranges(tmp_path / "run", 2, PLAIN) as run, connect(run.address) as session:
        session.join(large_model())
        session.commit(GRADIENT)
        if not lease_is_there:
            expire_all(run.lives[1])
        run.lives[1].stop()
        copytree(tmp_path / "run" / "1", older)
        run.back(1)
        for _ in range(3):
            session.commit(GRADIENT)
        run.lives[1].stop()
        run.back(1, checkpoint_dir=older)
        with pytest.raises(InvalidRequest, match=r"range 1/2 at .* older than its workers know: version \d then, 1 now"):
            session.commit(GRADIENT)


def test_a_range_that_lost_its_folder_is_refused_and_goes_on_once_it_has_it_again(tmp_path: Path) -> None:
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address) as session:
        session.join(large_model())
        session.commit(GRADIENT)
        run.lives[1].stop()
        run.back(1, checkpoint_dir=tmp_path / "empty")
        with pytest.raises(InvalidRequest, match=r"range 1/2 at .* has lost its data: .*version 2.*gem-ctl reshard"):
            session.commit(GRADIENT)
        with connect(run.address) as other, pytest.raises(InvalidRequest, match="has lost its data"):
            other.join(large_model())
        assert workers(run.lives[1]) == []
        run.lives[1].stop()
        run.back(1, checkpoint_dir=tmp_path / "1")
        assert session.commit(GRADIENT).lost
        assert session.commit(GRADIENT).version == 3
        assert run.each(version) == [3, 2]
        np.testing.assert_array_equal(session.theta, run.theta)


def swapped(run: Ranges, peers: tuple[str, ...]) -> None:
    """Starts the leader again with other addresses of the others."""
    run.lives[0].stop()
    run.back(0, peers=peers)


def test_addresses_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    with ranges(tmp_path, 3, PLAIN) as run, connect(run.address) as session, connect(run.address) as reader:
        right = run.lives[0].config.peers
        swapped(run, right[::-1])
        with pytest.raises(InvalidRequest, match=r"holds the elements \[8192, 13908\).*not \[4096, 8192\).*in this order"):
            session.join(large_model())
        assert run.each(workers) == [[], [], []]
        swapped(run, right)
        session.join(large_model())
        swapped(run, right[::-1])
        with pytest.raises(InvalidRequest, match="in this order"):
            reader.read()


# -- interruptions


def interrupted(work: Callable[[], Any]) -> None:
    """Has Ctrl-C hit the caller's thread once its own part has been sent, while those of the others are under way."""
    attempt = Link.attempt

    def then_interrupt(link: Link, *arguments: Any) -> Any:
        result = attempt(link, *arguments)
        if link.part.leads:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "attempt", then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            work()


@pytest.mark.parametrize("transport", ["grpc", "tcp"], indirect=True)
def test_after_ctrl_c_the_session_is_usable_and_no_thread_goes_on(transport: Transport, tmp_path: Path) -> None:
    with (
        ranges(tmp_path, 3, PLAIN, **transport.of_ranges) as run,
        connect(run.address) as session,
    ):
        session.join(large_model())
        session.commit(GRADIENT)
        with apply_thread_held(run.lives[1]), apply_thread_held(run.lives[2]):
            interrupted(lambda: session.commit(GRADIENT))
        wait_until(lambda: threads_of_ranges() == 0, "the threads to end")
        answer = session.commit(GRADIENT)
        assert (answer.lost, session.generation) == (True, 2)
        np.testing.assert_array_equal(answer.theta, run.theta)
        answer = session.commit(GRADIENT)
        assert not answer.lost
        np.testing.assert_array_equal(answer.theta, run.theta)
        assert session.transport == transport.name
        assert threads_of_ranges() == 2
        session.close()
        assert run.each(lambda live: ended(live)["left"]) == [1, 1, 1]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_read_does_not_end_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address) as session:
        session.join(large_model())
        session.commit(GRADIENT)
        with monkeypatch.context() as interrupting:
            interrupting.setattr(Future, "exception", interrupt)  # while it waits for range 1
            with pytest.raises(KeyboardInterrupt):
                session.read()
        np.testing.assert_array_equal(session.read(), run.theta)
        answer = session.commit(GRADIENT)
        assert (answer.lost, answer.version, session.generation) == (False, 2, 1)
        assert session.transport == "tcp"


def test_without_a_second_server_there_is_no_thread_for_it(tmp_path: Path) -> None:
    with serving() as live, connect(live.address) as session:
        session.join(large_model())
        session.commit(GRADIENT)
        session.read()
        assert threads_of_ranges() == 0


# -- servers that are restarted one by one with other hyper-parameters


def changed(run: Ranges, index: int, **changes: Any) -> None:
    """Restarts one server with these hyper-parameters."""
    run.lives[index].stop()
    run.back(index, hyperparameters=replace(PLAIN, **changes), given=frozenset(changes))


@pytest.mark.parametrize(("order", "changes"), [((0, 1), {"learning_rate": 0.25}), ((1, 0), {"epochs": 7})], ids=str)
def test_a_worker_that_registers_while_servers_are_restarted_one_by_one_waits(
    order: tuple[int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    patience = Patience()
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address, retry=patience.retry()) as session:
        with connect(run.address) as first:
            first.join(large_model())
            first.commit(GRADIENT)
        changed(run, order[0], **changes)
        joining = in_background(lambda: session.join(large_model()))
        wait_until(lambda: patience.pauses, "the worker to wait")
        assert not joining.done()
        changed(run, order[1], **changes)
        joining.result(DEADLINE)
        assert session.commit(GRADIENT).version == 2
        assert run.each(version) == [2, 2]


def test_servers_that_stay_different_are_named_with_what_differs(tmp_path: Path) -> None:
    patience = Patience()
    patience.run_out()
    with ranges(tmp_path, 2, PLAIN) as run, connect(run.address, retry=patience.retry()) as session:
        with connect(run.address) as first:
            first.join(large_model())
        changed(run, 1, learning_rate=0.25)
        with pytest.raises(SettingsDiffer) as error:
            session.join(large_model())
        text = f"range 1/2 at {run.lives[1].address}: .*learning_rate 0.5 there, 0.25 here.*; range 0 is at {run.address}"
        assert re.fullmatch(text, str(error.value))
        assert patience.pauses
