"""The arithmetic of one commit, once its turn has come: what the rule decides and computes."""

from __future__ import annotations

import numpy as np
from gem_api.errors import RuleFailed

from gem_server.core.central_variable import CentralVariable
from gem_server.core.commits import Commit, Step
from gem_server.core.facts import Applied
from gem_server.core.leases import REPLY
from gem_server.core.undo import rule_failed
from gem_server.rules import PiFacts, RuleInput, UpdateRule, is_users


def accepts(rule: UpdateRule, name: str, rule_input: RuleInput) -> tuple[bool, RuleFailed | None]:
    """Whether the rule of that name accepts a commit, and the failure if a user's rule raised an exception instead."""
    try:
        return bool(rule.accepts(rule_input)), None
    except Exception as error:
        if not is_users(rule):
            raise
        return False, rule_failed(rule, name, error)


def move(rule: UpdateRule, central: CentralVariable, commit: Commit, rule_input: RuleInput, accepted: bool) -> PiFacts | None:
    """Applies an accepted commit to θ, or else gives the worker the current θ; writes its reply."""
    lease, layout, theta, pi = commit.lease, central.layout, central.theta, None
    assert layout is not None
    lease.swap_snapshots(commit.header.base_version)
    buffers = lease.buffers_and_reply()
    if accepted:
        pi = rule.apply(layout, theta, commit.gradient, buffers, rule_input)
        rule.scale(rule_input, pi)  # `Core.finish` calls it again, when it is too late to raise
    else:
        rule.pull(theta, buffers)
    if lease.shared_reply is not None and REPLY in lease.buffers:  # the rule keeps a reply buffer of its own
        np.copyto(lease.shared_reply, lease.buffers[REPLY])
    return pi


def fail(error: RuleFailed) -> None:
    """The arithmetic of a commit that the rule has raised an exception on."""
    raise error


def facts(rule: UpdateRule, step: Step, pi: PiFacts | None, version: int) -> Applied:
    """What became of a commit; `version` is the central variable's after it."""
    lease, header = step.commit.lease, step.commit.header
    return Applied(
        ticket=step.commit.ticket,
        worker=lease.worker,
        sequence=header.sequence,
        version=version,
        base_version=lease.base_version,
        staleness=step.rule_input.staleness,
        loss=header.loss,
        samples=header.samples,
        pi=pi,
        scale=rule.scale(step.rule_input, pi) if step.accepted else 0.0,
        discarded=not step.accepted,
    )
