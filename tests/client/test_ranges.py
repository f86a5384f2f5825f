"""θ over several servers: a session trains, reads and leaves as with one. That θ is the same: `test_same_bits.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from client.range_helpers import GRADIENT, SHAPES, SIZE, large_model, ranges
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, connect
from gem_server.security.tls import TlsFiles
from kit.certificates import Authority
from kit.model import PLAIN, ended, in_background, workers
from kit.regions import linux_only
from kit.server import DEADLINE
from kit.tokens import ALICE, LINES, write_tokens


def test_a_session_knows_the_whole_model_and_one_lease(tmp_path: Path) -> None:
    with ranges(tmp_path, 3, PLAIN) as run, connect(run.address) as session:
        theta = session.join(large_model())
        assert {tensor.name: tensor.shape for tensor in session.layout.tensors} == SHAPES
        assert (session.layout.bounds, session.layout.size, theta.shape) == (None, SIZE, (SIZE,))
        np.testing.assert_array_equal(session.layout.split(theta)["w"], large_model()["w"])
        leases = run.each(lambda live: live.on_loop(lambda: list(live.core.leases.live)))
        assert leases == [[session._member.registration.lease_id]] * 3
        assert run.each(lambda live: live.on_loop(lambda: live.core.run_id)) == [session.run_id] * 3
        assert session.commit({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}).version == 1
        assert session.base == (1, 1, (1, 1))
        assert (session.version, session.steps_done, session.generation) == (1, 1, 1)


@linux_only
def test_servers_that_differ_in_how_they_are_reached(tmp_path: Path) -> None:
    with ranges(tmp_path, 2, PLAIN, memory=True) as run:
        run.lives[1].stop()
        run.back(1, memory_socket="")
        with connect(run.address) as session:
            session.join(large_model())
            session.commit(GRADIENT)
            assert (session.transport, session.shares_memory) == ("memory+tcp", False)
            np.testing.assert_array_equal(session.commit(GRADIENT).theta, run.theta)


def test_a_first_value_that_every_range_elects_a_worker_for(tmp_path: Path) -> None:
    """Four workers join at the same time: none waits for one that waits for it."""
    with ranges(tmp_path, 3, PLAIN) as run:
        sessions = [connect(run.address) for _ in range(4)]
        joining = [in_background(lambda session=session: session.join(large_model())) for session in sessions]  # type: ignore[misc]
        for joined in joining:
            np.testing.assert_array_equal(joined.result(DEADLINE), run.theta)
        for session in sessions:
            session.close()


# -- shards


def test_shards_come_from_the_leader_and_end_with_the_run(tmp_path: Path) -> None:
    settings = Hyperparameters(rule="downpour", epochs=2, batch_size=4, shard_size=8)
    with ranges(tmp_path, 2, settings) as run, connect(run.address) as session:
        session.join(large_model())
        seen = []
        for batch in session.shards(20):
            seen += list(batch)
            session.commit(GRADIENT)
        assert sorted(seen) == sorted([*range(20)] * 2)
        final = session.pull_final().copy()
        np.testing.assert_array_equal(final, run.theta)
        assert run.each(ended) == [{"left": 1}] * 2
        assert run.lives[0].on_loop(lambda: run.lives[0].core.samples_committed) == 40


# -- reading


def test_a_reader_joins_the_ranges(tmp_path: Path) -> None:
    with ranges(tmp_path, 3, PLAIN) as run, connect(run.address) as session, connect(run.address) as reader:
        session.join(large_model())
        for done in range(3):
            np.testing.assert_array_equal(reader.pull(), run.theta)
            assert (reader.version, reader.layout) == (done, session.layout)
            np.testing.assert_array_equal(reader.read(), run.theta)
            session.commit(GRADIENT)
        assert workers(run.lives[1]) == [session.name]


def test_a_reader_of_a_server_that_does_not_lead_is_told(tmp_path: Path) -> None:
    with ranges(tmp_path, 2) as run, connect(run.address) as session, connect(run.lives[1].address) as astray:
        session.join(large_model())
        with pytest.raises(InvalidRequest, match=r"holds the elements \[4096, 13908\).*connect to the server of range 0"):
            astray.read()
        with pytest.raises(InvalidRequest, match="connect to the server of range 0"):
            astray.join(large_model())


def test_the_token_and_the_authority_count_for_every_range(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, tokens = authority.issue("server"), write_tokens(tmp_path / "tokens", *LINES)
    encrypted = {"tls": TlsFiles(own.cert, own.key), "tokens": tokens}
    with ranges(tmp_path, 2, PLAIN, **encrypted) as run:
        with connect(run.address, name="alice", token=ALICE, tls_ca=authority.cert) as session:
            session.join(large_model())
            session.commit(GRADIENT)
            assert session.transport == "tls"
            np.testing.assert_array_equal(session.theta, run.theta)
        assert run.each(ended) == [{"left": 1}] * 2
