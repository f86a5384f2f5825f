"""Checks what all servers of a simulation promise together, beside what each promises alone (see `truth`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gem_server.durability import checkpoint
from gem_server.durability.manifest import Entry
from simulation.truth import Known, Truth, require


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
        manifests: How many checkpoints over all ranges are complete.
    """

    ranges: list[Truth]
    shards: dict[Known, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    torn: set[Known] = field(default_factory=set)
    rejected: set[tuple[Known, int]] = field(default_factory=set)
    forgetful: set[int] = field(default_factory=set)
    manifests: int = 0

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

    # -- checkpoints over all ranges

    def manifest_is_written(self, entries: Sequence[Entry], cut: Mapping[str, int]) -> None:
        """Checks that the checkpoints of all ranges belong together."""
        self.manifests += 1
        states = [checkpoint.read_state(Path(entry.path)) for entry in entries]
        require(len({state["run_id"] for state in states}) == 1, "a manifest names checkpoints of different runs")
        for index, state in enumerate(states):
            for lease in state["leases"]:
                self._fits_cut(index, lease["lease_id"], lease["sequence"], cut.get(lease["lease_id"], 0))

    def _fits_cut(self, index: int, lease_id: str, sequence: int, cut: int) -> None:
        require(sequence <= cut, f"range {index} has commit {sequence} of {lease_id} in a checkpoint that ends with {cut}")
        lacking = [(lease_id, number) for number in range(sequence + 1, cut + 1)]
        bad = [known for known in lacking if known not in self.torn and (known, index) not in self.rejected]
        require(not bad, f"range {index} lacks commits {bad} in a checkpoint that ends with {cut}")

    def manifest_stands(self, entries: Sequence[Entry]) -> None:
        """Checks that the checkpoints that a manifest names are still there."""
        for entry in entries:
            require((Path(entry.path) / "state.json").exists(), f"{entry.path} is gone, although the manifest names it")


def _common(applied: list[set[Known]]) -> set[Known]:
    """The commits that all ranges have applied."""
    return applied[0].intersection(*applied[1:])
