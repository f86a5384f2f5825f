"""Checks what all servers of a simulation promise together, beside what each promises alone (see `truth`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gem_server.durability import checkpoint
from simulation.truth import History, Known, Truth, require


@dataclass
class Everywhere:
    """The promises of all ranges together.

    Attributes:
        ranges: What each range has promised. Range 0 leads.
        shards: The shard of each commit that was sent.
        batches: How many commits a shard needs.
        torn: Commits that were under way when their worker died, or took another lease.
        rejected: Commits that a range has rejected, with the range.
        forgetful: Ranges that may forget what they have said: some starts keep no log, or their disk is lost for ever.
        backups: How many backups in mid-training are complete.
    """

    ranges: list[Truth]
    shards: dict[Known, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    torn: set[Known] = field(default_factory=set)
    rejected: set[tuple[Known, int]] = field(default_factory=set)
    forgetful: set[int] = field(default_factory=set)
    backups: int = 0

    # -- commits

    def acknowledges(self, known: Known) -> None:
        """Records that a worker takes a commit for applied everywhere."""
        runs = {run for truth in self.ranges if (run := truth.runs.get(known))}
        require(len(runs) <= 1, f"commit {known} is a part of several runs: {runs}")
        lacking = [index for index, truth in enumerate(self.ranges) if known not in truth.acknowledged]
        require(not set(lacking) - self.forgetful, f"commit {known} counts as done, but ranges {lacking} have not said so")

    def completes(self, lease_id: str, shard_id: int) -> None:
        """Checks that all commits of a shard were applied in every range, as its worker says that it is done."""
        mine = [known for known, shard in self.shards.items() if shard == shard_id and known[0] == lease_id]
        whole = [known for known in mine if all(known in truth.acknowledged for truth in self.ranges)]
        require(
            len(whole) >= self.batches[shard_id] or bool(self.forgetful),
            f"shard {shard_id} is done, but not all ranges have it",
        )

    def differences_are_explained(self, under_way: set[Known]) -> None:
        """Checks that two ranges differ only by the commits under way, by torn ones and by those that a range has rejected."""
        if self.forgetful:
            return
        applied = [set(truth.applied) for truth in self.ranges]
        for known in set.union(*applied) - _common(applied) - under_way - self.torn:
            lacking = [index for index, mine in enumerate(applied) if known not in mine]
            unexplained = [index for index in lacking if (known, index) not in self.rejected]
            require(not unexplained, f"commit {known} is missing in ranges {unexplained}, and its worker took it for applied")

    def versions_are_explained(self, versions: Sequence[int]) -> None:
        """Checks at rest that each range's version counts the commits that all have, and its own torn or half rejected ones."""
        applied = [set(truth.applied) for truth in self.ranges]
        common = _common(applied)
        for mine, version in zip(applied, versions, strict=True):
            partial = {known for known in mine - common if known in self.torn or self._is_rejected(known)}
            require(version == len(common) + len(partial), f"version {version}, but {len(common)} + {len(partial)} commits")

    def _is_rejected(self, known: Known) -> bool:
        return any((known, index) in self.rejected for index in range(len(self.ranges)))

    # -- backups in mid-training

    def backup_is_complete(self, copies: Sequence[tuple[Path, History]], under_way: set[Known]) -> None:
        """Checks the checkpoints of all ranges: each has what the leader's has, except for commits cut short, and knows the
        last commit of each lease.

        Args:
            copies: The checkpoint of each range, and what led to it.
            under_way: The commits that not all ranges had answered once the leader was copied.
        """
        self.backups += 1
        states = [checkpoint.read_state(path) for path, _ in copies]
        require(len({state.run_id for state in states}) == 1, "a backup holds checkpoints of different runs")
        held = [set(applied) for _, (applied, _) in copies]
        for index, mine in enumerate(held):
            for lease in states[index].leases:
                last = max((sequence for lease_id, sequence in mine if lease_id == lease.lease_id), default=0)
                require(lease.sequence == last, f"range {index} took commit {lease.sequence} for the last, not {last}")
            lacking = {known for known in held[0] - mine if (known, index) not in self.rejected}
            unexplained = lacking - under_way - self.torn
            require(not unexplained, f"range {index} lacks commits {unexplained} in a backup whose leader counts them as done")

    def goes_back(self) -> None:
        """A backup was put in place: the ranges differ by the commits that came between their copies."""
        applied = [set(truth.applied) for truth in self.ranges]
        self.torn |= set.union(*applied) - _common(applied)


def _common(applied: list[set[Known]]) -> set[Known]:
    """The commits that all ranges have applied."""
    return applied[0].intersection(*applied[1:])
