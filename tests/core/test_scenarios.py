"""Replays the transcripts of tests/scenarios: commands to a core, and after ---- what it answers.

A transcript is read like a tutorial. Its commands (a lease is named by its id, lease-1, lease-2 … in order of opening):

    settings RULE=… SHARDS=…            a new core with these hyper-parameters; comes first
    now SECONDS                         the time is now this; leases whose time is up end
    register WORKER                     opens a lease
    initialize LEASE VALUE…             gives θ its first value; with too few values the transfer breaks off
    pull LEASE                          reads θ
    commit LEASE SEQUENCE GRADIENT…     a commit, from header to answer; base=N for a base version of its own
    send LEASE SEQUENCE GRADIENT…       the same, up to its ticket
    apply                               the oldest ticket's turn
    renew LEASE / leave LEASE
    shard LEASE SAMPLES / complete LEASE SHARD
    checkpoint                          writes one
    crash                               the server dies and comes back from the newest checkpoint
    status

GOLDEN=write writes the answers anew: read the diff before you commit it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gem_api.errors import GemError, LeaseEnded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_server.core.commits import Commit
from gem_server.core.shards import NoShard
from gem_server.core.state_machine import Core
from gem_server.core.values import Admission, Applied, Ended, PullDecision
from gem_server.durability import checkpoint
from kit import golden
from kit.core import header, make_core, save_core, uploaded

TRANSCRIPTS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.txt"))
TWO = Layout.of({"w": (2,)})
RULED_LINE = "----"


class Player:
    """One core and its scripted clock. Each command is a method; it yields the lines of its answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now = 0.0
        self._settings = Hyperparameters()
        self._core = self._make(first_id=1)
        self._tickets: list[Commit] = []

    def answer(self, line: str) -> list[str]:
        """The answer to one command; an error is an answer too."""
        name, *words = line.split()
        try:
            return list(getattr(self, name)(*words))
        except GemError as error:
            reason = f" ({error.reason})" if isinstance(error, LeaseEnded) else ""
            return [f"{type(error).__name__}{reason}: {error}"]

    # -- commands

    def settings(self, *words: str) -> Iterator[str]:
        defaults = Hyperparameters()
        given = dict(word.split("=") for word in words)
        self._settings = Hyperparameters(**{name: type(getattr(defaults, name))(value) for name, value in given.items()})
        self._core = self._make(first_id=1)
        yield "ok"

    def now(self, seconds: str) -> Iterator[str]:
        self._now = float(seconds)
        ended = self._core.expire(self._now)
        yield from map(_ended, ended) if ended else ["ok"]

    def register(self, worker: str) -> Iterator[str]:
        registration = self._core.register(worker, TWO, self._now)
        if registration.ended:
            yield _ended(registration.ended)
        yield (
            f"{registration.lease_id} for {worker}"
            + (", must initialise" if registration.must_initialize else "")
            + (f", {registration.steps_done} steps done" if registration.steps_done else "")
        )

    def initialize(self, lease_id: str, *values: str) -> Iterator[str]:
        self._core.require_initializer(lease_id, self._now)
        self._core.central.theta[: len(values)] = _floats(values)
        if len(values) < TWO.size:
            yield f"broken off after {len(values)} of {TWO.size} values"
            return
        self._core.initialized()
        yield f"version 0: {_show(self._core.central.theta)}"

    def pull(self, lease_id: str) -> Iterator[str]:
        decision = self._core.pull_decision(lease_id, self._now)
        if decision is not PullDecision.READY:
            yield str(decision)
            return
        lease = self._core.leases.get(lease_id)
        yield f"version {self._core.pull(lease)}: {_show(self._core.reply(lease))}"

    def commit(self, lease_id: str, sequence: str, *words: str) -> Iterator[str]:
        waiting = len(self._tickets)
        yield from self.send(lease_id, sequence, *words)
        if len(self._tickets) > waiting:
            yield from self.apply()

    def send(self, lease_id: str, sequence: str, *words: str) -> Iterator[str]:
        base = next((int(word.removeprefix("base=")) for word in words if word.startswith("base=")), None)
        head = header(self._core, lease_id, int(sequence), base)
        admission, lease = self._core.admit(head, self._now)
        if admission is Admission.FRESH:
            gradient = uploaded(self._core, _floats([word for word in words if not word.startswith("base=")]))
            self._tickets.append(self._core.ticket(lease, head, self._now, gradient))
            yield f"ticket {self._tickets[-1].ticket}"
        elif admission is Admission.REPEATED:
            assert lease.last_applied is not None
            yield f"repeated: {_applied(lease.last_applied)}: {_show(self._core.reply(lease))}"
        else:
            yield "queued already"

    def apply(self) -> Iterator[str]:
        ticketed = self._tickets.pop(0)
        step = self._core.begin(ticketed)
        applied = self._core.finish(step, step.run(), self._now)
        yield f"{_applied(applied)}: {_show(self._core.reply(ticketed.lease))}"

    def renew(self, lease_id: str) -> Iterator[str]:
        yield f"until {self._core.renew(lease_id, self._now).expires_at:g}"

    def leave(self, lease_id: str) -> Iterator[str]:
        yield _ended(self._core.leave(lease_id))

    def shard(self, lease_id: str, samples: str, *knows: str) -> Iterator[str]:
        """The worker still works on the shards `knows`, or on all that it holds; "none" for none."""
        all_ = {shard_id for shard_id, (holder, _) in self._core.ledger.held.items() if holder == lease_id}
        holding = {int(shard_id) for shard_id in knows if shard_id != "none"} if knows else all_
        shard = self._core.lease_shard(lease_id, int(samples), self._now, holding)
        if isinstance(shard, NoShard):
            yield "complete" if shard.complete else "wait"
            return
        of = f" of {shard.group}'s" if shard.group else " of"
        yield f"shard {shard.shard_id}: samples {shard.begin} to {shard.end - 1}{of} epoch {shard.epoch}"

    def complete(self, lease_id: str, shard_id: str) -> Iterator[str]:
        yield "accepted" if self._core.complete_shard(lease_id, int(shard_id), self._now) else "not held"

    def checkpoint(self) -> Iterator[str]:
        yield save_core(self._core, self._folder, keep=3).name

    def crash(self) -> Iterator[str]:
        latest = checkpoint.newest(self._folder, lambda path, why: pytest.fail(why))
        assert latest is not None
        self._tickets.clear()
        self._core = self._make(first_id=100)
        checkpoint.restore(*latest, self._core, self._now)
        self._core.mark_restarted(shard_ids=1)
        yield f"back at version {self._core.central.version}: {_show(self._core.central.theta)}"

    def status(self) -> Iterator[str]:
        core = self._core
        theta = _show(core.central.theta) if core.central.initialized else "no value"
        yield f"version {core.central.version}: {theta}"
        for lease in core.leases.live.values():
            yield f"{lease.lease_id} {lease.worker}: commit {lease.sequence}, until {lease.expires_at:g}"
        yield f"shards: {len(core.ledger.held)} held, {core.ledger.pending} pending, {core.ledger.completed} completed"

    def _make(self, first_id: int) -> Core:
        return make_core(self._settings, lease_seconds=10, first_id=first_id)


def _floats(words: tuple[str, ...] | list[str]) -> np.ndarray:
    return np.array([float(word) for word in words], np.float32)


def _show(values: np.ndarray) -> str:
    return " ".join(f"{value:g}" for value in values.tolist())


def _applied(applied: Applied) -> str:
    pi = ""
    if applied.pi:
        pi = f", π max {applied.pi.max_ratio:.0%}, zero {applied.pi.zero_ratio:.0%}"
    return f"ticket {applied.ticket}, version {applied.version}, staleness {applied.staleness}{pi}"


def _ended(ended: Ended) -> str:
    shards = f", shards returned: {ended.shards_returned}" if ended.shards_returned else ""
    return f"{ended.lease_id} of {ended.worker} ended: {ended.reason}{shards}"


# -- transcripts


def replayed(written: str, player: Player) -> str:
    """The transcript with the answers that its commands get now."""
    lines: list[str] = []
    commands: list[str] = []
    answered = False
    for line in written.splitlines():
        if line == RULED_LINE:
            lines += [line, *(answer for command in commands for answer in player.answer(command))]
            commands, answered = [], True
        elif not line or not answered:
            lines.append(line)
            answered = False
            if line and not line.startswith("#"):
                commands.append(line)
    assert not commands, f"commands without {RULED_LINE}: {commands}"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_transcript_plays_as_it_is_written(path: Path, tmp_path: Path) -> None:
    golden.check(path, replayed(path.read_text(encoding="utf-8"), Player(tmp_path)))


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 5
