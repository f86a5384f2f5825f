"""The kinds of updates that the run's rule takes, and the commits that it discards, as seen by any client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import SMALL, Wire, Worker, theta_bits
from kit.server import Live
from kit.ways import all_ways, running

GRADIENT, DELTA, UNSPECIFIED = pb.UPDATE_KIND_GRADIENT, pb.UPDATE_KIND_DELTA, pb.UPDATE_KIND_UNSPECIFIED


@contextmanager
def run(rule: str, options: str = "", way: str = "grpc", **settings: object) -> Iterator[tuple[Live, Wire]]:
    """A server with a rule."""
    hyperparameters = Hyperparameters(rule=rule, rule_options=options, learning_rate=0.5, **settings)  # type: ignore[arg-type]
    with running(way, hyperparameters) as (live, wire):
        yield live, wire


def influence(live: Live, worker: str) -> float | None:
    return live.metric("gem_worker_influence_total", worker=worker)


def commit_as(worker: Worker, kind: int) -> list[bytes]:
    return [worker.header(update_kind=kind), *worker.body()]


@pytest.mark.parametrize(
    ("rule", "local_steps", "kind"),
    [
        ("gem", 1, GRADIENT), ("gem", 4, GRADIENT), ("downpour", 1, GRADIENT), ("downpour", 4, DELTA),
        ("adaptive", 4, DELTA), ("agn", 4, GRADIENT), ("dcasgd", 1, GRADIENT), ("ringmaster", 4, GRADIENT),
        ("aeasgd", 1, DELTA), ("fedasync", 1, DELTA), ("fedbuff", 1, DELTA), ("diloco", 1, DELTA),
    ],
)  # fmt: skip
@all_ways
def test_a_worker_is_told_what_to_commit_and_anything_else_is_refused(rule: str, local_steps: int, kind: int, way: str) -> None:
    with run(rule, way=way, local_steps=local_steps) as (live, wire):
        worker = wire.started("ann")
        assert worker.registration.update_kind == kind
        before = theta_bits(live)
        for wrong in {GRADIENT, DELTA} - {kind}:
            refusal = worker.whole(*commit_as(worker, wrong)).refusal()
            assert refusal.error == "INVALID_REQUEST"
            assert refusal.status in (None, grpc.StatusCode.INVALID_ARGUMENT)
            assert f"rule {rule} with {local_steps} local steps takes a" in refusal.details
        assert theta_bits(live) == before
        result, _ = worker.took(worker.whole(*commit_as(worker, kind)).answer(SMALL.size))
        assert (result.sequence, result.version, result.discarded) == (1, 1, False)
        assert live.metric("gem_commits_rejected_total", error="InvalidRequest") == 1


@all_ways
def test_a_client_that_knows_of_no_kinds_commits_gradients(way: str) -> None:
    with run("downpour", way=way) as (_, wire):
        worker = wire.started("ann")
        assert worker.took(worker.whole(*commit_as(worker, UNSPECIFIED)).answer(SMALL.size))[0].version == 1
    with run("diloco", way=way) as (_, wire):
        worker = wire.started("ann")
        assert worker.whole(*commit_as(worker, UNSPECIFIED)).refusal().error == "INVALID_REQUEST"


@pytest.mark.parametrize("kind", [3, 77, -1])
@all_ways
def test_a_kind_that_does_not_exist_is_no_gradient(kind: int, way: str) -> None:
    with run("downpour", way=way) as (live, wire):
        worker = wire.started("ann")
        before = theta_bits(live)
        refusal = worker.whole(*commit_as(worker, kind)).refusal()
        assert (refusal.error, f"update kind {kind} does not exist" in refusal.details) == ("INVALID_REQUEST", True)
        assert theta_bits(live) == before
        assert worker.commit()[0].version == 1


@all_ways
def test_a_commit_that_is_left_out_is_answered_with_a_fresh_theta_and_counted(way: str) -> None:
    """R = 1: Bob's gradient is one commit late. It is answered, has no influence, and the next one counts."""
    with run("ringmaster", "threshold=1", way=way) as (live, wire):
        ann, bob = wire.started("ann"), wire.join("bob")
        bob.pull()
        ann.commit()
        before = theta_bits(live)
        result, theta = bob.commit()
        assert (result.discarded, result.sequence, result.version, result.base_version) == (True, 1, 1, 1)
        assert (result.staleness, result.HasField("pi")) == (1, False)
        assert theta_bits(live) == before
        assert theta.tobytes() == before[1]
        counts = {outcome: live.metric("gem_commits_total", outcome=outcome) for outcome in ("applied", "discarded")}
        assert counts == {"applied": 1, "discarded": 1}
        assert live.metric("gem_worker_commits_total", worker="bob") == 0
        assert live.metric("gem_samples_committed_total") == 1
        assert live.metric("gem_central_version") == 1
        assert (influence(live, "ann"), influence(live, "bob")) == (1, 0)
        fresh, theta = bob.commit()
        assert (fresh.discarded, fresh.version, influence(live, "bob")) == (False, 2, 1)
        np.testing.assert_array_equal(theta, np.zeros(SMALL.size, np.float32))
