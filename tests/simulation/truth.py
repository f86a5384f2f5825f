"""Checks one server of a simulation: compares its promises to clients with what happened. It does not read the log."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gem_server.core.leases import Lease
from gem_server.core.state_machine import Core
from gem_server.core.values import Applied
from gem_server.durability.capture import run_buffers

Known = tuple[str, int]  # a commit: lease and sequence
History = tuple[list[Known], list[bytes]]  # the commit of each version from 1 on, and θ of each from 0 on


class Violation(AssertionError):
    """A promise was broken."""


def require(kept: bool, promise: str) -> None:
    if not kept:
        raise Violation(promise)


def fingerprint(core: Core) -> bytes:
    """A hash of everything that a recovered server must have, bit for bit."""
    digest = hashlib.blake2b(core.central.theta.tobytes(), digest_size=16)
    for lease in sorted(core.leases.live.values(), key=lambda lease: lease.lease_id):
        spare = (lease.spare_version, lease.spare_progress) if lease.overlaps else None
        place = (lease.lease_id, lease.worker, lease.sequence, lease.base_version, lease.progress, lease.reply_progress, spare)
        digest.update(repr(place).encode())
        for name in sorted(lease.buffers):
            digest.update(lease.buffers[name].tobytes())
    for _, buffer in sorted(run_buffers(core).items()):
        digest.update(buffer.tobytes())
    ledger = core.ledger.state()
    # Above 2³² the next id is the range, which a start that keeps no log chooses.
    ledger = replace(ledger, held=sorted(ledger.held), next_id=ledger.next_id % (1 << 32))
    numbers = sorted(core.shared.numbers.items())
    counts = core.central.version, core.central.progress, core.rounds, core.samples_committed
    digest.update(repr((counts, core.steps_done, numbers, ledger)).encode())
    return digest.digest()


def reply_hash(core: Core, lease: Lease) -> bytes:
    """A hash of the θ that a lease's worker would be sent now, and of its version."""
    return hashlib.blake2b(core.reply(lease).tobytes() + str(lease.base_version).encode(), digest_size=16).digest()


@dataclass
class Truth:
    """The promises of one server so far, and the checks of them. It applies the commits of a lease in the order of their
    sequence.

    Attributes:
        applied: Each version's commit, from version 1 on.
        discarded: The version that stood still, of each commit that the rule left out.
        theta: Each version's θ, from version 0 on.
        acknowledged: Versions of the commits that a client was told are applied, or discarded.
        told: The newest version that anyone was told of.
        completed: Shards that a worker was told are done: group, epoch, begin, end.
        prints: After which record the run had which fingerprint.
        begun: The commit whose turn it is.
        last_ticket: That of the last commit whose turn it was.
        shards: What each id stands for that a worker was told.
        runs: The run that each commit was applied in.
        replies: What each lease's worker was last told of as θ, and what it may have been sent since, as hashes.
        being_made: Leases whose next reply is being made: nobody knows it before.
        unlogged: Whether the server keeps no log now: then what it says may be forgotten.
    """

    applied: list[Known] = field(default_factory=list)
    discarded: dict[Known, int] = field(default_factory=dict)
    theta: list[bytes] = field(default_factory=list)
    acknowledged: dict[Known, int] = field(default_factory=dict)
    told: int = 0
    completed: set[tuple[str, int, int, int]] = field(default_factory=set)
    prints: dict[int, bytes] = field(default_factory=dict)
    begun: Known | None = None
    last_ticket: int = 0
    shards: dict[int, tuple[str, int, int, int]] = field(default_factory=dict)
    runs: dict[Known, str] = field(default_factory=dict)
    replies: dict[str, list[bytes]] = field(default_factory=dict)
    being_made: set[str] = field(default_factory=set)
    unlogged: bool = False
    _told_reply: set[str] = field(default_factory=set)  # leases whose workers have got one
    _fleeting: list[Callable[[], object]] = field(default_factory=list)  # what undoes all that was said without a log

    def started(self, core: Core) -> None:
        """Records that θ has its first value."""
        self.begins_anew()
        self.theta = [core.central.theta.tobytes()]

    def begins_anew(self) -> None:
        """Drops what led to nothing: a server starts with an empty folder."""
        require(not self.acknowledged and not self.told, "the run is gone, though a client was told of its commits")
        self.applied, self.theta, self.told = [], [], 0
        self.discarded.clear()
        self.completed.clear()
        self.shards.clear()
        self.replies.clear()
        self._told_reply.clear()

    def forgets(self) -> None:
        """Drops the promises of a server without a log that crashed."""
        while self._fleeting:
            self._fleeting.pop()()
        self.begun, self.last_ticket = None, 0
        self.replies.clear()
        self._told_reply.clear()

    def history(self, version: int) -> History:
        """The commits and values of θ up to a version. A crash may change them later, unless a client was told of them."""
        return self.applied[:version], self.theta[: version + 1]

    def goes_back(self, history: History) -> None:
        """An operator has put a backup with this history in place: all else is forgotten."""
        self.applied, self.theta, self.told = list(history[0]), list(history[1]), 0
        self.acknowledged = {known: at for known, at in self.acknowledged.items() if known in self.applied}
        self.discarded, self.completed, self.prints, self.shards = {}, set(), {}, {}
        self.begun, self.last_ticket = None, 0
        self.replies.clear()
        self._told_reply.clear()

    def makes(self, core: Core, lease: Lease) -> bytes:
        """Notes the reply that a lease's worker would get now, and returns its hash."""
        made = reply_hash(core, lease)
        self.being_made.discard(lease.lease_id)
        self.replies.setdefault(lease.lease_id, []).append(made)
        return made

    def _hands_out(self, lease_id: str, made: bytes) -> None:
        """A worker gets a reply: the server must not come back with one that was before."""
        known = self.replies.get(lease_id, [])
        if made in known:
            del known[: known.index(made)]
            self._told_reply.add(lease_id)

    def applies(self, lease_id: str, applied: Applied, core: Core) -> None:
        known = (lease_id, applied.sequence)
        before = max((sequence for lease, sequence in self.applied if lease == lease_id), default=0)
        require(applied.sequence > before, f"commit {applied.sequence} of {lease_id} was applied after commit {before}")
        require(applied.ticket > self.last_ticket, f"ticket {applied.ticket} had its turn after ticket {self.last_ticket}")
        require(known not in self.applied, f"commit {known} is applied twice")
        require(known not in self.discarded, f"commit {known} was discarded, and has its turn again")
        self.last_ticket, self.begun = applied.ticket, None
        self.runs[known] = core.run_id
        if applied.discarded:
            require(applied.version == len(self.applied), f"version {applied.version} came of a discarded commit")
            require(core.central.theta.tobytes() == self.theta[-1], f"the discarded commit {known} moved θ")
            self.discarded[known] = applied.version
            return
        require(applied.version == len(self.applied) + 1, f"version {applied.version} follows version {len(self.applied)}")
        self.applied.append(known)
        self.theta.append(core.central.theta.tobytes())

    def acknowledges(self, lease_id: str, applied: Applied, made: bytes) -> None:
        known = (lease_id, applied.sequence)
        if self.unlogged and known not in self.acknowledged:
            self._fleeting.append(lambda: self.acknowledged.pop(known))
        before = self.acknowledged.setdefault(known, applied.version)
        require(before == applied.version, f"commit {known} was acknowledged as version {before} and {applied.version}")
        if applied.discarded:
            require(self.discarded.get(known) == applied.version, f"commit {known} is said to be discarded, but was not")
        else:
            require(self.applied[applied.version - 1] == known, f"commit {known} is acknowledged, but not applied")
        self.tells(applied.version)
        self._hands_out(lease_id, made)

    def pulls(self, lease_id: str, version: int, made: bytes) -> None:
        """Records that a worker got θ."""
        self.tells(version)
        self._hands_out(lease_id, made)

    def tells(self, version: int) -> None:
        if self.unlogged:
            before = self.told
            self._fleeting.append(lambda: setattr(self, "told", before))
        self.told = max(self.told, version)

    def completes(self, shard: tuple[str, int, int, int]) -> None:
        """Records that a worker got the reply that its shard is complete."""
        if self.unlogged and shard not in self.completed:
            self._fleeting.append(lambda: self.completed.discard(shard))
        self.completed.add(shard)

    def names(self, shard_id: int, shard: tuple[str, int, int, int]) -> None:
        """Records the id of a shard that a worker received."""
        before = self.shards.setdefault(shard_id, shard)
        require(before == shard, f"shard id {shard_id} stands for {before} and for {shard}")

    def deals(self, shard: tuple[str, int, int, int]) -> None:
        require(shard not in self.completed, f"shard {shard} is dealt again, after its worker was told that it is done")

    def recovered(self, core: Core, number: int) -> None:
        """Checks the server after a restart."""
        version = core.central.version
        lost = [known for known, at in self.acknowledged.items() if at > version]
        require(not lost, f"acknowledged commits are lost: {lost}; the server came back at version {version}")
        require(version >= self.told, f"a client was told of version {self.told}; the server came back at {version}")
        if self.begun is not None and version == len(self.applied) + 1:  # its turn had come when the power failed
            self.applied.append(self.begun)
            self.theta.append(core.central.theta.tobytes())
        elif self.begun is not None and self.begun not in self.applied and _remembers(core, self.begun):
            self.discarded[self.begun] = version
        self.begun = None
        require(version <= len(self.applied), f"the server came back at version {version}, which never was")
        require(core.central.theta.tobytes() == self.theta[version], f"θ of version {version} came back with other bits")
        del self.applied[version:], self.theta[version + 1 :]
        gone = {known for known in self.discarded if known[0] in core.leases.live and not _remembers(core, known)}
        require(not gone & self.acknowledged.keys(), f"commits that were acknowledged as discarded are forgotten: {gone}")
        self.discarded = {known: at for known, at in self.discarded.items() if known not in gone}
        self.last_ticket = 0
        if number in self.prints:
            require(fingerprint(core) == self.prints[number], f"the run is not as it was after record {number}")
        self.prints = {at: seen for at, seen in self.prints.items() if at <= number}
        self._replies_came_back(core)
        self.consistent(core)

    def _replies_came_back(self, core: Core) -> None:
        """Checks each lease's reply. Until its worker has got it, a start from an older checkpoint may bring back an earlier
        one, but none from before the last one that the worker got."""
        for lease_id, lease in core.leases.live.items():
            known, made = self.replies.setdefault(lease_id, []), reply_hash(core, lease)
            fits = made in known or lease_id not in self._told_reply - self.being_made
            require(fits, f"the server came back with a reply of {lease_id} from before the one that its worker got")
            if made in known:
                del known[known.index(made) :]
            known.append(made)
        self.being_made.clear()

    def consistent(self, core: Core) -> None:
        """Checks that every dealt sample is completed, held or to be dealt again, and that memory is what the live workers
        need."""
        ledger = core.ledger
        dealt = sum(deck.epoch * deck.samples + deck.next for deck in ledger.decks.values())
        held = sum(shard.end - shard.begin for _, shard in ledger.held.values())
        due = sum(end - begin for deck in ledger.decks.values() for _, begin, end in deck.returned)
        require(dealt == ledger.samples_completed + held + due, "samples of an epoch are unaccounted for")
        require(
            {holder for holder, _ in ledger.held.values()} <= core.leases.live.keys(), "a lease that has ended holds shards"
        )
        for_all = 1 + bool(core.central.decay) + len(core.rule.shared) + core.rule.temporaries + core.central.copies
        most = core.central.size * 4 * (for_all + 3 * len(core.leases.live))
        most += max(core.memory.uploads, core.memory.usual_uploads)
        require(core.memory.held <= most, f"{core.memory.held} bytes are held, where {most} are needed at most")


def _remembers(core: Core, known: Known) -> bool:
    """Whether the commit was applied, according to a live lease."""
    lease = core.leases.live.get(known[0])
    return lease is not None and lease.sequence >= known[1]
