"""Quarantine: which rejections count, when it begins, and how it is lifted."""

from __future__ import annotations

import shlex
from itertools import count
from typing import Any, cast

import pytest
import structlog
from click.testing import CliRunner
from gem_api.errors import (
    GemError,
    IncompleteTransfer,
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    NonFiniteGradient,
    NormOutOfBounds,
    Quarantined,
    SequenceGap,
)
from gem_api.hyperparameters import Hyperparameters
from gem_api.process import logs
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin
from gem_ctl import cli as ctl
from gem_ctl.text import status as as_text
from gem_ctl.watch import Watch, _picture
from gem_server.core.norm_bound import NormHistory
from gem_server.core.quarantine import MAX_NAMES, Quarantine, lift_command
from gem_server.core.shards import Shard
from gem_server.core.state_machine import Core
from gem_server.core.values import EndReason
from kit.core import SMALL, bits, commit, header, start, uploaded

BAD = NormOutOfBounds("too large")


def quarantining_core(after: int = 2, ratio: float = 0.0) -> Core:
    numbers = count(1)
    return Core(
        "run", Hyperparameters(shard_size=8), lease_seconds=60.0, memory_limit=0, new_id=lambda: f"lease-{next(numbers)}",
        norms=NormHistory(ratio), quarantine=Quarantine(after),
    )  # fmt: skip


def test_a_worker_is_held_after_so_many_refusals_in_a_row() -> None:
    """Each worker has its own count."""
    quarantine = Quarantine(3)
    assert not any(quarantine.rejected(worker, NonFiniteGradient("a NaN")) for worker in ("eve", "ann", "eve", "ann"))
    assert quarantine.rejected("eve", BAD)
    quarantine.require_free("ann")
    assert {name: refusals.count for name, refusals in quarantine.held.items()} == {"eve": 3}
    with pytest.raises(
        Quarantined, match=r"'eve'.* 3 rejected commits in a row.*NormOutOfBounds: too large.*gem-ctl quarantine lift"
    ):
        quarantine.require_free("eve")


def test_an_accepted_commit_in_between_starts_the_count_anew() -> None:
    quarantine = Quarantine(2)
    for _ in range(5):
        assert not quarantine.rejected("ann", BAD)
        quarantine.accepted("ann")
    quarantine.require_free("ann")


@pytest.mark.parametrize("kind", [SequenceGap, LayoutMismatch, IncompleteTransfer, InvalidRequest, LeaseEnded])
def test_refusals_that_do_not_speak_of_the_gradient_do_not_count(kind: type[GemError]) -> None:
    quarantine = Quarantine(1)
    assert not any(quarantine.rejected("ann", kind("not its gradient's fault")) for _ in range(5))
    quarantine.require_free("ann")


def test_who_is_let_in_again_starts_with_a_clean_count() -> None:
    quarantine = Quarantine(2)
    for _ in range(2):
        quarantine.rejected("eve", BAD)
    quarantine.lift("eve")
    quarantine.require_free("eve")
    assert not quarantine.rejected("eve", BAD)
    assert quarantine.rejected("eve", BAD)


def test_lifting_for_one_who_is_not_held_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'ann'.*gem-ctl quarantine list"):
        Quarantine(2).lift("ann")


def test_made_up_names_do_not_fill_the_memory_and_push_out_the_oldest_only() -> None:
    quarantine = Quarantine(1)
    for number in range(MAX_NAMES + 5):
        quarantine.rejected(f"eve-{number}", BAD)
    assert len(quarantine.held) == MAX_NAMES
    quarantine.require_free("eve-4")
    with pytest.raises(Quarantined):
        quarantine.require_free("eve-5")


# -- in the core


def test_quarantine_ends_the_lease_with_its_reason_and_gives_its_shards_back() -> None:
    core = quarantining_core(after=2)
    _, eve = start(core, ["ann", "eve"])
    assert isinstance(core.lease_shard(eve, 64, 0.0), Shard)
    assert core.rejected(eve, BAD) is None
    ended = core.rejected(eve, BAD)
    assert ended is not None
    assert (ended.worker, ended.reason, ended.shards_returned) == ("eve", EndReason.QUARANTINED, 1)
    assert [lease.worker for lease in core.leases.live.values()] == ["ann"]
    with pytest.raises(LeaseEnded, match="quarantined"):
        core.admit(header(core, eve, 1), 0.0)


def test_the_name_can_not_register_until_it_is_let_in_again() -> None:
    """A new lease does not start the count anew."""
    core = quarantining_core(after=2)
    _, eve = start(core, ["ann", "eve"])
    assert core.rejected(eve, BAD) is None
    core.leave(eve)
    assert core.rejected(core.register("eve", SMALL, 0.0).lease_id, BAD) is not None
    with pytest.raises(Quarantined):
        core.register("eve", SMALL, 0.0)
    assert core.register("mallory", SMALL, 0.0).lease_id in core.leases.live
    core.quarantine.lift("eve")
    assert core.register("eve", SMALL, 0.0).lease_id in core.leases.live


def test_the_refusal_of_a_lease_that_has_ended_counts_for_nobody() -> None:
    core = quarantining_core(after=1)
    _, eve = start(core, ["ann", "eve"])
    core.leave(eve)
    assert core.rejected(eve, BAD) is None
    assert core.rejected("no such lease", BAD) is None


def test_a_norm_beyond_the_bound_gets_no_ticket_and_changes_nothing() -> None:
    core = quarantining_core(ratio=10.0)
    (ann,) = start(core, theta=1.0)
    core.norms.resume([1.0] * 50)
    commit(core, ann, 1, 1.0)
    lease, ticket = core.leases.get(ann), core.next_ticket
    before = [bits(core.central.theta), *(bits(buffer) for buffer in lease.buffers.values())]
    head = header(core, ann, 2)
    core.admit(head, 0.0)
    with pytest.raises(NormOutOfBounds):
        core.ticket(lease, head, 0.0, uploaded(core, 1.0), norm=10.1)
    assert [bits(core.central.theta), *(bits(buffer) for buffer in lease.buffers.values())] == before
    assert (core.next_ticket, lease.queued, lease.sequence) == (ticket, None, 1)
    assert commit(core, ann, 2, 1.0).sequence == 2


@pytest.mark.parametrize("name", ["ann", "two words", "$(reboot); 'x' \"y\"", "-h", "--server=evil:1", "# x"])
def test_the_command_that_lets_a_worker_in_again_names_it_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lifted: list[str] = []
    monkeypatch.setattr(Admin, "lift_quarantine", lambda admin, worker: lifted.append(worker))
    program, *arguments = shlex.split(lift_command(name), comments=True)
    assert (program, CliRunner().invoke(ctl.main, arguments).exit_code, lifted) == ("gem-ctl", 0, [name])


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a client chose: escape sequences, line breaks, characters that turn the direction of writing."""
    evil = "x\x1b[2J\r\nworker registered\u202e"
    worker = pb.WorkerStatus(name=evil)
    status = pb.GetStatusResponse(run_id=evil, server_version=evil, workers=[worker], leases_ended={evil: 1})
    watch = Watch(cast(Any, None), None)
    watch.status, watch.trouble = status, evil
    before = structlog.get_config()
    try:
        logs.configure("text").bind(worker="\x1b[2J").warning("commit rejected", why=evil)
    finally:
        structlog.configure(**before)
    for text in (as_text(status), _picture(watch, [], "here"), capsys.readouterr().err):
        assert not [character for character in text if not (character.isprintable() or character == "\n")]
        assert "\nworker registered" not in text
        assert "\\x1b[2J" in text
