"""The arithmetic of one commit: what the rule decides and computes, and the rollback if a user's own rule raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from gem_api.errors import RuleFailed
from gem_api.layout import Vector

from gem_server.core.central_variable import CentralVariable
from gem_server.core.commits import Commit, Step
from gem_server.core.leases import REPLY, Lease
from gem_server.core.values import Applied
from gem_server.rules import PiStatistics, RuleInput, Shared, UpdateRule, is_users, where_raised
from gem_server.rules.average import follow

_NOTHING = nullcontext()


def accepts(rule: UpdateRule, name: str, rule_input: RuleInput) -> tuple[bool, RuleFailed | None]:
    """Whether the rule of that name accepts a commit, and the failure if a user's rule raised an exception instead."""
    try:
        return bool(rule.accepts(rule_input)), None
    except Exception as error:
        if not is_users(rule):
            raise
        return False, rule_failed(rule, name, error)


def move(
    rule: UpdateRule, central: CentralVariable, commit: Commit, rule_input: RuleInput, accepted: bool
) -> PiStatistics | None:
    """Applies an accepted commit to θ and its average, or else gives the worker the current θ; writes its reply."""
    lease, layout, theta, pi = commit.lease, central.layout, central.theta, None
    assert layout is not None
    lease.swap_snapshots(commit.header.base_version)
    buffers = lease.buffers_and_reply()
    if accepted:
        pi = rule.apply(layout, theta, commit.gradient, buffers, rule_input)
        rule.scale(rule_input, pi)  # `Core.finish` calls it again, when it is too late to raise
        if central.average is not None:  # once nothing raises any more
            follow(rule.threads, theta, central.average, central.decay)
    else:
        rule.pull(theta, buffers)
    if lease.shared_reply is not None and REPLY in lease.buffers:  # the rule keeps a reply buffer of its own
        np.copyto(lease.shared_reply, lease.buffers[REPLY])
    return pi


def fail(error: RuleFailed) -> None:
    """The arithmetic of a commit that the rule has raised an exception on."""
    raise error


def applied_commit(rule: UpdateRule, step: Step, pi: PiStatistics | None, version: int) -> Applied:
    """The facts of a finished commit; `version` is the central variable's after it."""
    commit, rule_input, accepted, _ = step
    lease, header = commit.lease, commit.header
    return Applied(
        ticket=commit.ticket,
        worker=lease.worker,
        sequence=header.sequence,
        version=version,
        base_version=lease.base_version,
        staleness=rule_input.staleness,
        loss=header.loss,
        samples=header.samples,
        pi=pi,
        scale=rule_input.weight * rule.scale(rule_input, pi) if accepted else 0.0,
        discarded=not accepted,
    )


# -- rollback


def undone_if_rule_raises(
    rule: UpdateRule, name: str, theta: Vector, shared: Shared, lease: Lease
) -> AbstractContextManager[None]:
    """Runs a user's rule: if it raises, restores θ and all buffers and numbers of the rule, and raises RuleFailed.

    A user's rule may raise at any point, with its work half done. A replay of the log comes to the same state, because the
    rule raises there too. MemoryError is not caught: it ends the server, as any error in a built-in rule does. Built-in rules
    raise nothing, so nothing is copied for them.
    """
    return _undone(rule, name, theta, shared, lease) if is_users(rule) else _NOTHING


@contextmanager
def _undone(rule: UpdateRule, name: str, theta: Vector, shared: Shared, lease: Lease) -> Iterator[None]:
    arrays = [theta, *lease.buffers.values(), *shared.buffers.values()]
    if lease.shared_reply is not None:
        arrays.append(lease.shared_reply)
    copies = [array.copy() for array in arrays]
    buffers, numbers = dict(lease.buffers), dict(shared.numbers)
    spare = lease.spare_version, lease.spare_progress
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        for array, copy in zip(arrays, copies, strict=True):
            np.copyto(array, copy)
        lease.buffers.update(buffers)
        shared.numbers.clear()
        shared.numbers.update(numbers)
        lease.spare_version, lease.spare_progress = spare
        raise rule_failed(rule, name, error) from error


def rule_failed(rule: UpdateRule, name: str, error: Exception) -> RuleFailed:
    """The error that a worker gets after an exception in a user's rule."""
    return RuleFailed(f"rule {name} raised {where_raised(rule, error)}; the commit was not applied")
