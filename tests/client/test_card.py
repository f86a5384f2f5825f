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

    def __init__(self, answer: pb.GetStatusResponse | Exception) -> None:
        self._answer = answer
        self.links = self.leader = self.connection = self

    def require_usable(self) -> None: ...

    def status(self, timeout: float, *, curves: bool) -> pb.GetStatusResponse:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def drawn(answer: pb.GetStatusResponse | Exception, name: str = "alice") -> str:
    member: Any = Member(answer)
    return card.card(name, member)


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


def test_a_run_of_a_fixed_number_of_steps_shows_how_many() -> None:
    status = pb.GetStatusResponse()
    status.hyperparameters.steps = 1_000
    assert "own commits 3 of 1,000" in text(drawn(status))


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (pb.ShardStatus(epochs=4), "epoch 1 of 4, 0 % of the run"),
        (pb.ShardStatus(epoch=1, epochs=4, completed=10, leased=3, pending=3), "epoch 2 of 4, 31 % of the run"),  # 10 of 32
        (pb.ShardStatus(epoch=3, epochs=4, completed=32), "epoch 4 of 4, 100 % of the run"),
    ],
)
def test_the_bar_is_the_share_of_the_shards_of_all_epochs(shards: pb.ShardStatus, expected: str) -> None:
    html = drawn(pb.GetStatusResponse(shards=shards))
    assert expected in text(html)
    assert f"width:{expected.split()[4]}%" in html


def test_a_run_without_a_last_epoch_has_no_bar() -> None:
    html = drawn(pb.GetStatusResponse(shards=pb.ShardStatus(epoch=6, completed=9)))
    assert "epoch 7 version" in text(html)
    assert "width:" not in re.sub(r"(max|stroke)-width:", "", html)


def test_a_server_that_is_stalled_says_why() -> None:
    stalled = pb.GetStatusResponse(state=pb.RUN_STATE_STALLED, stall=pb.Stall(reason="the disk is full"))
    assert "the disk is full" in text(drawn(stalled))


def test_a_state_of_a_newer_server_is_shown_by_its_number() -> None:
    assert "state 99 · server host:1" in text(drawn(pb.GetStatusResponse(state=99)))  # type: ignore[arg-type]


# -- its curves


def test_a_curve_leaves_out_what_is_not_known() -> None:
    curves = pb.RunCurves(seconds=[0, 1, 2, 4], loss=[4, 2, np.nan, 1], staleness=[np.nan] * 4, pi_median=[np.inf] * 4)
    assert lines(curves) == [[(3, 3), (56.5, 36.3), (217, 53), (217, 53)]]


@pytest.mark.parametrize("count", [1, 5])
def test_a_steady_curve_is_in_the_middle(count: int) -> None:
    (line,) = lines(pb.RunCurves(seconds=range(count), loss=[0.5] * count))
    assert {y for _, y in line} == {28}
    assert len(line) >= 2, "a line of one point is invisible"


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


def test_a_lost_server_is_said(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    live.stop()
    said = shown(session)
    assert f"no server at {live.address} (is gem-server running?)" in said
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


def test_a_broken_session_makes_a_card(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.delattr(session._member, "links")
        assert "AttributeError" in shown(session)


def test_a_closed_session_says_so_and_keeps_its_figures(live: Live) -> None:
    with connect(live.address) as session:
        session.join(model())
        session.commit(GRADIENT)
    said = shown(session)
    assert "this session is closed" in said
    assert said.endswith("version 1 own commits 1")


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
