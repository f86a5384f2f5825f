"""The average of θ that the run keeps, read by workers and readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.range_helpers import large_model, ranges, train
from client.torch_helpers import flat, network, take_step, training
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, connect
from gem_server.rpc.training import TrainingServicer
from kit.model import GRADIENT, Array, model, theta, workers
from kit.server import Live, config, serving

KEPT = Hyperparameters(rule="downpour", learning_rate=0.5, average=0.75)


@pytest.fixture
def kept() -> Iterator[Live]:
    """A server that keeps an average."""
    with serving(config(KEPT)) as live:
        yield live


def average(live: Live) -> Array:
    """A copy of the average that the server keeps."""
    return live.on_loop(lambda: live.core.central.average.copy())


def test_it_is_read_beside_theta_with_a_lease_and_without(kept: Live) -> None:
    with connect(kept.address) as session, connect(kept.address, name="reader") as reader:
        first = session.join(model()).copy()
        session.commit(GRADIENT)  # θ falls by 0.25
        read = session.read(average=True)
        np.testing.assert_array_equal(read, first - 0.0625)
        np.testing.assert_array_equal(read, average(kept))
        np.testing.assert_array_equal(reader.read(average=True), read)
        assert (session.read_version, reader.read_version) == (1, 1)
        np.testing.assert_array_equal(session.read(), theta(kept))
        np.testing.assert_array_equal(session.theta, theta(kept))
        assert session.hyperparameters.average == 0.75
        session.commit(GRADIENT)
        np.testing.assert_array_equal(session.pull_final(average=True), average(kept))


def test_several_servers_keep_that_of_their_ranges(tmp_path: Path) -> None:
    settings = Hyperparameters(average=0.9)
    found: list[Array] = []
    for count in (1, 2):
        with ranges(tmp_path / str(count), count, settings) as run, connect(run.address) as session:
            train(session, session.join(large_model()))
            found.append(session.read(average=True))
            np.testing.assert_array_equal(found[-1], np.concatenate(run.each(average)))
    np.testing.assert_array_equal(found[0], found[1])


def test_the_optimizer_loads_the_final_one(kept: Live) -> None:
    net = network()
    with training(kept, net) as (optimizer, _):
        for step in range(3):
            take_step(net, optimizer, step)
        optimizer.load_final(average=True)
    np.testing.assert_array_equal(flat(net), average(kept))
    assert not np.array_equal(flat(net), theta(kept))


NONE_KEPT = "this run keeps no average of θ: start its server with --average DECAY, such as 0.999"


def test_a_run_without_one_says_how_to_keep_one_and_the_worker_stays(live: Live) -> None:
    with connect(live.address, name="ann") as session:
        session.join(model())
        for ask in (session.read, session.pull_final):
            with pytest.raises(InvalidRequest, match=NONE_KEPT):
                ask(average=True)
        assert workers(live) == ["ann"]
        session.commit(GRADIENT)


def test_a_server_that_knows_of_none_and_sends_theta_is_noticed(kept: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pull = TrainingServicer._pull_without_lease

    async def of_before(servicer: TrainingServicer, transfer: Any, format_: Any, average: bool) -> None:
        await pull(servicer, transfer, format_, False)

    monkeypatch.setattr(TrainingServicer, "_pull_without_lease", of_before)
    with connect(kept.address) as session:
        session.join(model())
        with pytest.raises(InvalidRequest, match=NONE_KEPT):
            session.read(average=True)
        np.testing.assert_array_equal(session.read(), theta(kept))


def test_it_is_not_what_a_worker_computes_its_gradients_on(kept: Live) -> None:
    with connect(kept.address) as session:
        session.join(model())
        link = session._member.links.leader
        with pytest.raises(InvalidRequest, match="read without a lease: leave out the lease id"):
            link.connection.pull(session._member.lease_id, lambda _: session.theta, average=True)
