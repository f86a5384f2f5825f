"""Checks a chaos run: each server by itself (`server_checker.py`), then what several that hold a range of θ each have together.

A commit that a worker was told is applied must be in all of them. A commit that only some have is torn. That is allowed if
nobody was told that it is applied, and if it is the last one of a lease whose worker was killed, or which ended on one of the
servers. Without torn commits, all have the same version at rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from chaos.server_checker import Findings, Known, LogContent, ServerVerdict, Testimony, check_server, lines_of, testimony
from chaos.worker import bounds


class Fate(StrEnum):
    """How a session came to its lease's end."""

    KILLED = "its worker was killed"
    ENDED = "its lease ended"
    LEFT = "its worker left in order"


@dataclass
class Verdict(Findings):
    """The result of a run, in numbers, and what is wrong between servers.

    Attributes:
        ranges: The results of each server.
        committed: Commits that a worker was told are applied by all servers.
        whole: Commits that are in all servers' logs.
        torn: Commits that only some of them have, by what became of their session.
        torn_by_range: How many of these each server has.
        versions_at_rest: The servers' versions once no worker was left, as they said themselves.
        shards_completed: Those in the log of the server that leads.
    """

    ranges: list[ServerVerdict] = field(default_factory=list)
    committed: int = 0
    whole: int = 0
    torn: dict[Fate, int] = field(default_factory=dict)
    torn_by_range: list[int] = field(default_factory=list)
    versions_at_rest: list[int] = field(default_factory=list)
    shards_completed: int = 0

    @property
    def good(self) -> bool:
        return all(verdict.good for verdict in self.ranges) and not self.problems

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def all_problems(self) -> list[str]:
        of_ranges = [f"range {index}: {text}" for index, verdict in enumerate(self.ranges) for text in verdict.problems]
        return [*of_ranges, *self.problems]


@dataclass
class SessionTestimony:
    """The workers' records of their commits as a whole.

    Attributes:
        parts: The CRC-32 of each range's part of each commit's gradient; None if it is rounded before it is sent.
        committed: Commits that a worker was told are applied.
        samples: How many samples of a shard the committed commits of a lease cover; the key is lease and shard.
        fates: By lease.
    """

    parts: dict[Known, list[int | None]] = field(default_factory=dict)
    committed: set[Known] = field(default_factory=set)
    samples: Counter[tuple[str, int]] = field(default_factory=Counter)
    fates: dict[str, Fate] = field(default_factory=dict)

    def hear(self, lines: Iterable[dict[str, Any]]) -> None:
        """Takes the diary of one worker."""
        leases: dict[str, None] = {}  # in order
        closed = False
        for line in lines:
            known = (line.get("lease", ""), line.get("sequence", 0))
            if line["event"] == "sending":
                self.parts[known] = line["parts"]
            elif line["event"] == "committed":
                self.committed.add(known)
                for shard, samples in line["batches"]:
                    self.samples[known[0], shard] += samples
            closed = closed or line["event"] == "closed"
            if known[0]:
                leases[known[0]] = None
        *former, last = leases or [""]
        self.fates |= dict.fromkeys(former, Fate.ENDED) | {last: Fate.LEFT if closed else Fate.KILLED}


def check(folders: Sequence[Path], diaries: Iterable[Path], versions_at_rest: Sequence[int] = ()) -> Verdict:
    """Checks a run on servers whose checkpoints and logs are in these folders, in the order of their ranges. The run has ended
    gracefully, and no checkpoint and no part of a log was removed."""
    verdict, sessions, all_lines = Verdict(versions_at_rest=list(versions_at_rest)), SessionTestimony(), []
    for diary in diaries:
        lines = lines_of(diary)
        sessions.hear(lines)
        all_lines += lines
    told = [testimony(all_lines, index) for index in range(len(folders))]
    contents = []
    for folder, of_range in zip(folders, told, strict=True):
        of_server, content = check_server(folder, of_range)
        verdict.ranges.append(of_server)
        if content is not None:
            contents.append(content)
    if len(contents) == len(folders):
        _Comparison(verdict, sessions, told, contents).judge()
    return verdict


class _Comparison:
    def __init__(self, verdict: Verdict, sessions: SessionTestimony, told: list[Testimony], contents: list[LogContent]) -> None:
        self._verdict = verdict
        self._sessions = sessions
        self._told = told
        self._contents = contents
        self._applied = [set(content.applied) for content in contents]
        self._whole = set.intersection(*self._applied)

    def judge(self) -> None:
        self._judge_runs()
        self._judge_sent()
        self._judge_acknowledged()
        self._judge_torn()
        self._judge_versions()
        self._judge_shards()

    def _judge_runs(self) -> None:
        """They belong to one run, and hold all of θ."""
        leader, *peers = self._contents
        parameters = sum(content.size for content in self._contents)
        for index, content in enumerate(self._contents):
            begin, end = bounds(parameters, index, len(self._contents))
            if content.size != end - begin:
                self._verdict.object_to(f"range {index} has {content.size} elements; [{begin}, {end}) are expected")
        for index, content in enumerate(peers, 1):
            if content.state["run_id"] != leader.state["run_id"]:
                self._verdict.object_to(f"range {index} belongs to run {content.state['run_id']}, not {leader.state['run_id']}")
            if unknown := content.opened - leader.opened:
                self._verdict.object_to(f"range {index} has leases that the leader has not opened: {sorted(unknown)}")

    def _judge_sent(self) -> None:
        """Each server was sent its part of the gradient, whenever it was tried."""
        for index, told in enumerate(self._told):
            for known, sent in told.sent.items():
                parts = self._sessions.parts.get(known)
                if parts is None or {gradient for gradient, _, _ in sent} != {parts[index]}:
                    self._verdict.object_to(f"range {index} was sent something else than its part of {known}")

    def _judge_acknowledged(self) -> None:
        committed = self._sessions.committed
        self._verdict.committed = len(committed)
        for known in committed:
            silent = [index for index, told in enumerate(self._told) if known not in told.acknowledged]
            if silent:
                self._verdict.object_to(f"{known} was acknowledged before ranges {silent} had answered")
            if known not in self._whole:
                self._verdict.object_to(f"{known} was acknowledged, and is in the ranges {self._holders(known)} only")

    def _judge_torn(self) -> None:
        """A torn commit is the last of a lease that was not left in order."""
        last: dict[str, int] = {}
        for lease, sequence in set.union(*self._applied):
            last[lease] = max(last.get(lease, 0), sequence)
        fates: Counter[Fate] = Counter()
        for known in set.union(*self._applied) - self._whole:
            lease, sequence = known
            fate = self._sessions.fates.get(lease, Fate.KILLED)
            fates[fate] += 1
            if fate is Fate.LEFT:
                self._verdict.object_to(f"{known} is in the ranges {self._holders(known)} only, and {fate}")
            if sequence != last[lease]:
                self._verdict.object_to(f"{known} is in the ranges {self._holders(known)} only, and its lease went on")
        self._verdict.torn = dict(fates)

    def _judge_versions(self) -> None:
        """The versions of the ranges differ by the torn commits, and by nothing else."""
        verdict = self._verdict
        verdict.whole = len(self._whole)
        verdict.torn_by_range = [len(applied - self._whole) for applied in self._applied]
        for index, (of_range, torn) in enumerate(zip(verdict.ranges, verdict.torn_by_range, strict=True)):
            if of_range.applied != verdict.whole + torn:
                verdict.object_to(f"range {index} is at version {of_range.applied}, not {verdict.whole} + {torn} torn commits")
        if verdict.versions_at_rest not in ([], [of_range.applied for of_range in verdict.ranges]):
            verdict.object_to(f"the servers said {verdict.versions_at_rest} at rest; their logs say otherwise")

    def _judge_shards(self) -> None:
        """A shard is completed by the leader, once the commits of all its samples were acknowledged by every server."""
        leader, *peers = self._contents
        size = leader.state["hyperparameters"]["shard_size"]
        self._verdict.shards_completed = leader.completed.total()
        for index, content in enumerate(peers, 1):
            if content.completed:
                self._verdict.object_to(f"range {index} has completed shards: {sorted(content.completed)}")
        for shard in leader.completed:
            if self._sessions.samples[shard] != size:
                self._verdict.object_to(
                    f"shard {shard} is completed, and commits of {self._sessions.samples[shard]} of its {size} samples were "
                    "acknowledged"
                )

    def _holders(self, known: Known) -> list[int]:
        return [index for index, applied in enumerate(self._applied) if known in applied]
