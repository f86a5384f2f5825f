"""A server that goes and comes back, a connection that breaks or stalls: the session goes on, or gives up in time."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path

import gem_client
import numpy as np
import pytest
from client.conftest import Transport, trained
from gem_client import TransportError, connect
from kit.model import GRADIENT, PLAIN, Patience, ended, in_background, model, outcomes, theta, transports, version
from kit.regions import linux_only
from kit.server import DEADLINE, config, serving, wait_until


def test_a_server_that_comes_back_from_its_checkpoint_goes_on_with_the_same_lease(transport: Transport, tmp_path: Path) -> None:
    patience = Patience()
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "kept", **transport.settings)) as live:
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        session.commit(GRADIENT)
        live.stop()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: patience.pauses, "the session to try again")
        with serving(replace(live.config, listen=live.address, resume=True)) as back, session:
            answer = waiting.result(DEADLINE)
            assert (answer.lost, answer.version, session.generation) == (False, 2, 1)
            np.testing.assert_array_equal(answer.theta, [0.5] * 6 + [-0.5] * 3)
            assert session.commit(GRADIENT).version == 3
            assert outcomes(back) == {"applied": 3}
            assert transports(back) == {session.name: transport.name}


def test_a_session_that_has_lost_the_wire_goes_on_where_it_was(transport: Transport) -> None:
    with serving(config(PLAIN, **transport.settings)) as live, trained(live, Patience()) as (wire, session):
        for done in range(2, 5):
            wire.cut()
            assert session.commit(GRADIENT).version == done
            assert transports(live) == {session.name: transport.name}
        assert (session.generation, outcomes(live)) == (1, {"applied": 4})


def test_a_commit_whose_answer_was_lost_is_sent_again_and_applied_once(transport: Transport) -> None:
    with serving(config(PLAIN, **transport.settings)) as live, trained(live, Patience()) as (wire, session):
        wire.lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 2, "the commit to be applied")
        wire.cut()
        answer = waiting.result(DEADLINE)
        assert (answer.version, answer.lost, session.shares_memory) == (2, False, transport.is_memory)
        np.testing.assert_array_equal(answer.theta, [0.5] * 6 + [-0.5] * 3)
        assert outcomes(live) == {"applied": 2, "repeated": 1}
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, [0.25] * 6 + [-0.75] * 3)
        assert transports(live) == {session.name: transport.name}


@pytest.mark.parametrize("transport", [pytest.param("memory", marks=linux_only)], indirect=True)
def test_after_a_restart_without_a_checkpoint_the_sessions_theta_counts(transport: Transport) -> None:
    with serving(config(PLAIN, **transport.settings)) as live:
        session = connect(live.address, retry=Patience().retry())
        session.join(model())
        known = session.commit(GRADIENT).theta.copy()
        live.stop()
        with serving(replace(live.config, listen=live.address)) as back, session:
            answer = session.commit(GRADIENT)
            assert (answer.lost, answer.version, session.shares_memory) == (True, 0, transport.is_memory)
            np.testing.assert_array_equal(answer.theta, known)
            np.testing.assert_array_equal(theta(back), known)
            assert session.commit(GRADIENT).version == 1
            assert transports(back) == {session.name: transport.name}


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_a_server_rolled_back_behind_an_acknowledged_commit_ends_the_lease(
    transport: Transport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "kept", **transport.settings)) as live:
        session = connect(live.address, retry=Patience().retry())
        session.join(model())
        session.commit(GRADIENT)
        with gem_client.Admin(live.address) as admin:
            admin.checkpoint()
        shutil.copytree(tmp_path / "kept", tmp_path / "older")
        session.commit(GRADIENT)
        live.stop()
        older = replace(live.config, listen=live.address, checkpoint_dir=tmp_path / "older", resume=True)
        with serving(older) as back, session:
            answer = session.commit(GRADIENT)
            assert (answer.lost, answer.version, session.generation) == (True, 1, 2)
            np.testing.assert_array_equal(answer.theta, [0.75] * 6 + [-0.25] * 3)
            assert ended(back) == {"rolled_back": 1}
            assert "that it had applied: it is at version 1 now, and was at 2 or later" in caplog.text
            assert session.commit(GRADIENT).version == 2
            assert transports(back) == {session.name: transport.name}


def test_a_listener_that_never_answers_is_given_up() -> None:
    patience = Patience()
    patience.run_out()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with connect(address, retry=patience.retry(), timeout=0.3) as session:
            for use in (lambda: session.join(model()), session.pull):
                with pytest.raises(TransportError):
                    in_background(use).result(DEADLINE)


def test_a_commit_that_makes_no_progress_is_broken_off_and_the_session_recovers(transport: Transport) -> None:
    patience = Patience()
    with serving(config(PLAIN, **transport.settings)) as live, trained(live, patience, timeout=0.3) as (wire, session):
        assert transports(live) == {session.name: transport.name}
        wire.stall()
        patience.run_out()
        with pytest.raises(TransportError):
            in_background(lambda: session.commit(GRADIENT)).result(DEADLINE)
        patience.renew()
        wire.flow()
        wire.cut()
        assert session.commit(GRADIENT).lost
        assert not session.commit(GRADIENT).lost
        assert transports(live) == {session.name: transport.name}
