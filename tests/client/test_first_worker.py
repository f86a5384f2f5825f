"""The worker that saves and reports for all: exactly one, whoever leaves."""

from __future__ import annotations

from contextlib import ExitStack

from client.sampler_helpers import joined, settings
from gem_server.core.values import EndReason
from kit.model import in_background
from kit.server import DEADLINE, Live, config, serving


def end(live: Live, worker: str, reason: EndReason) -> None:
    core = live.core
    lease = core.leases.named(worker)
    assert lease is not None
    live.on_loop(lambda: core.end_lease(lease, reason))


def test_it_is_the_oldest_and_the_next_one_once_that_has_ended() -> None:
    with serving(config(settings())) as live, ExitStack() as opened:
        workers = {name: opened.enter_context(joined(live, name)) for name in "abc"}
        assert [workers[name].is_first for name in "abc"] == [True, False, False]
        end(live, "a", EndReason.EXPIRED)
        assert [workers[name].is_first for name in "bc"] == [True, False]
        workers["a"].commit(workers["a"].gradient)  # it registers again, as the youngest
        assert [workers[name].is_first for name in "abc"] == [False, True, False]


def test_exactly_one_is_first_after_the_end_and_none_that_had_died() -> None:
    with serving(config(settings())) as live, ExitStack() as opened:
        workers = [opened.enter_context(joined(live, name)) for name in "abcd"]
        left = [in_background(worker.pull_final) for worker in workers[:3]]
        end(live, "d", EndReason.EXPIRED)
        for each in left:
            each.result(DEADLINE)
        assert sum(worker.is_first for worker in workers[:3]) == 1
