"""Undoes what a user's own rule changed before it raised an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from gem_api.errors import RuleFailed
from gem_api.layout import Vector

from gem_server.core.leases import Lease
from gem_server.rules import Shared, UpdateRule, is_users, where_raised

_NOTHING = nullcontext()


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
    buffers, numbers, spare_version = dict(lease.buffers), dict(shared.numbers), lease.spare_version
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
        lease.spare_version = spare_version
        raise rule_failed(rule, name, error) from error


def rule_failed(rule: UpdateRule, name: str, error: Exception) -> RuleFailed:
    """The error that a worker gets after an exception in a user's rule."""
    return RuleFailed(f"rule {name} raised {where_raised(rule, error)}; the commit was not applied")
