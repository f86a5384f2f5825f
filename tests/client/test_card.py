"""The card that a notebook shows of a session: what it says, that its HTML is harmless, and that it changes nothing."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from gem_api.errors import ServerUnavailable
from gem_api.v1 import training_pb2 as pb
from gem_client import Session, card, connect
from hypothesis import given
from hypothesis import strategies as st
from kit.model import GRADIENT, Wire, in_background, model, outcomes, theta, workers
from kit.server import DEADLINE, Live, wait_until

HOSTILE = "<script>alert('1')</script>\"&\x1b[2J\u202e"
LOADS = re.compile(r"<(script|link|img|iframe|style)|[ '\"](src|href|on\w+)=|url\(|@import|://", re.IGNORECASE)
COUNTS = st.integers(0, 2**64 - 1)


def parsed(html: str) -> ElementTree.Element:
    """The card, which must be one well-formed element that neither loads nor runs anything."""
    assert not LOADS.search(html), html
    return ElementTree.fromstring(html)


def text(html: str) -> str:
    return " ".join("".join(f"{part} " for part in parsed(html).itertext()).split())


def shown(session: Session) -> str:
    return text(session._repr_html_())


class Member:
    """Stands in for a session's membership. Its server answers with a status, or with an error.

    Its `links`, their `leader` and its `connection` are this object too.
    """

    address, version, steps_done = "host:1", 7, 3

    def __init__(self, answer: pb.GetStatusResponse | Exception, name: str) -> None:
        self._answer, self.name = answer, name
        self.links = self.leader = self.connection = self

    def require_usable(self) -> None: ...

    def status(self, timeout: float, *, curves: bool) -> pb.GetStatusResponse:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def drawn(answer: pb.GetStatusResponse | Exception, name: str = "alice") -> str:
    member: Any = Member(answer, name)
    return card.card(member)


def lines(curves: pb.RunCurves) -> list[list[tuple[float, float]]]:
    """The points of each curve on a card."""
    found = parsed(drawn(pb.GetStatusResponse(curves=curves))).iter("polyline")
    return [[(float(x), float(y)) for x, y in re.findall(r"(\S+),(\S+)", line.attrib["points"])] for line in found]


# -- what it says


def test_it_shows_the_run_and_the_sessions_share_of_it(live: Live, session: Session) -> None:
    with connect(live.address) as other:
        other.join(model())
        other.commit(GRADIENT, loss=1.25)
        session.commit(GRADIENT, loss=1.25)
        session.report_evaluation(0.5, 0.75)
        session.commit(GRADIENT, loss=1.25)
        said = shown(session)
    for part in (
        session.name,
        f"training · server {live.address} · run {session.run_id}",
        "version 3",
        "own commits 2",
        "workers 2",
    ):
        assert f"{part} " in said
    assert "training loss 1.25 held-out loss 0.5, accuracy 75.0 %" in said


def test_the_curves_of_a_real_run_are_drawn(live: Live, session: Session) -> None:
    session.commit(GRADIENT, loss=2.0)
    wait_until(lambda: len(list(parsed(session._repr_html_()).iter("polyline"))) == 3, "the server to sample its curves")


def test_a_session_that_has_not_joined_shows_the_run_and_does_not_join(live: Live) -> None:
    with connect(live.address) as session:
        assert "waiting · server" in shown(session)
        assert workers(live) == []


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"hyperparameters": pb.Hyperparameters(steps=1_000)}, "own commits 3 of 1,000"),
    "begun": ({"shards": pb.ShardStatus(epochs=4)}, "epoch 1 of 4, 0 % of the run"),
    "in epoch 2": (
        {"shards": pb.ShardStatus(epoch=1, epochs=4, completed=10, leased=3, pending=3)},  # 10 of 32 shards
        "epoch 2 of 4, 31 % of the run",
    ),
    "ended": ({"shards": pb.ShardStatus(epoch=3, epochs=4, completed=32)}, "epoch 4 of 4, 100 % of the run"),
    "endless": ({"shards": pb.ShardStatus(epoch=6, completed=9)}, "epoch 7 version"),
    "stalled": ({"state": pb.RUN_STATE_STALLED, "stall": pb.Stall(reason="the disk is full")}, "the disk is full"),
    "of a newer server": ({"state": 99}, "state 99 · server host:1"),
}


@pytest.mark.parametrize(("status", "expected"), STATES.values(), ids=STATES)
def test_it_says_how_far_the_run_is_with_a_bar_if_it_has_a_last_epoch(status: dict[str, Any], expected: str) -> None:
    html = drawn(pb.GetStatusResponse(**status))
    assert expected in text(html)
    bars = re.findall(r"(?<!-)width:(\d+)%", html)
    assert bars == ([expected.split()[4]] if "% of the run" in expected else [])


@pytest.mark.parametrize(
    ("curves", "points"),
    [
        (
            pb.RunCurves(seconds=[0, 1, 2, 4], loss=[4, 2, np.nan, 1], staleness=[np.nan] * 4, pi_median=[np.inf] * 4),
            [[(3, 3), (56.5, 36.3), (217, 53), (217, 53)]],
        ),
        (pb.RunCurves(seconds=[0], loss=[0.5]), [[(110, 28), (110, 28)]]),  # in the middle; one point would be invisible
    ],
)
def test_a_curve_leaves_out_what_is_not_known(curves: pb.RunCurves, points: list[list[tuple[float, float]]]) -> None:
    assert lines(curves) == points


# -- it is harmless


def test_text_from_outside_is_escaped() -> None:
    settings: dict[str, Any] = {"run_id": HOSTILE, "stall": pb.Stall(reason=HOSTILE)}
    for html in (drawn(pb.GetStatusResponse(**settings), HOSTILE), drawn(ServerUnavailable(HOSTILE), HOSTILE)):
        said = text(html)
        assert said.count("<script>alert('1')</script>\"&\\x1b[2J\\u202e") == html.count("&lt;script") >= 2


@given(
    status=st.builds(
        pb.GetStatusResponse,
        version=COUNTS,
        staleness=st.floats(),
        pi_median=st.floats(),
        training_loss=st.floats(),
        worker_count=COUNTS,
        evaluation=st.builds(pb.ReportEvaluationRequest, loss=st.floats(), accuracy=st.floats()),
        shards=st.builds(pb.ShardStatus, epoch=COUNTS, epochs=COUNTS, completed=COUNTS, leased=COUNTS, pending=COUNTS),
        curves=st.builds(pb.RunCurves, seconds=st.lists(st.floats(0, 2**30, width=32)), loss=st.lists(st.floats(width=32))),
    )
)
def test_any_figures_make_a_card(status: pb.GetStatusResponse) -> None:
    html = drawn(status)
    assert "Error" not in text(html)
    assert not re.search(r"points='[^']*(nan|inf)", html)


# -- it does not raise


@pytest.mark.parametrize("closed", [False, True])
def test_a_lost_server_and_a_closed_session_are_said_with_its_own_figures(closed: bool, live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    (session.close if closed else live.stop)()
    said = shown(session)
    assert ("this session is closed" if closed else f"no server at {live.address} (is gem-server running?)") in said
    assert said.endswith("version 1 own commits 1")


def test_a_server_that_does_not_answer_is_not_waited_for_long(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with Wire(live.address) as wire, connect(wire.address) as session:
        assert "waiting" in shown(session)
        wire.stall()
        monkeypatch.setattr(card, "PATIENCE", 0.05)  # the session's own calls wait for a minute
        assert "the server did not answer within 0.05 s" in in_background(lambda: shown(session)).result(DEADLINE)
        wire.flow()


@pytest.mark.parametrize("error", [ServerUnavailable("it is gone"), RuntimeError("it is gone"), OSError(5, "it is gone")])
def test_no_error_leaves_the_card(error: Exception) -> None:
    assert "it is gone" in text(drawn(error))


def test_the_copy_in_a_forked_process_asks_no_server(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert "open another one after the fork" in shown(session)


# -- it changes nothing


def test_looking_changes_neither_the_session_nor_the_run(live: Live, session: Session) -> None:
    def everything() -> list[Any]:
        own = (session.base, session.steps_done, session.generation, session.batches_in_hand, session.transport)
        return [own, session.theta.tolist(), session.gradient.tolist(), theta(live).tolist(), outcomes(live), workers(live)]

    with connect(live.address) as other:
        other.join(model())
        session.commit(GRADIENT)
        other.commit(GRADIENT)  # θ is newer than what the session holds
        before = everything()
        shown(session)
        assert everything() == before
        assert session.commit(GRADIENT).staleness == 1


def test_it_waits_for_no_call_of_the_session(session: Session) -> None:
    with session._lock:  # as a commit under way holds it
        assert "training" in in_background(lambda: shown(session)).result(DEADLINE)
