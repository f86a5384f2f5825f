"""Checks one server of a chaos run. It reads the workers' diaries and the server's files, and calls neither workers nor server.

What it finds: every commit that a worker was told is applied is in the log, once, as the version that the worker was told,
with the gradient that the worker sent, and counted by its share of a batch; every θ that a worker pulled is the replayed θ of
that version, and every reply is the replayed one; every checkpoint, and the last one above all, is the replay at its place, to
the bit.

If several servers hold a range of θ each, all this holds for each by itself, and `checker.py` compares them.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.log_reader import BrokenLog, Entry, entries
from chaos.replay import Checkpoint, Contradiction, Floats, Replay, as_bfloat16, decoded

Known = tuple[str, int]  # a commit: lease and sequence
_MAX_PROBLEMS = 50


@dataclass
class Findings:
    """What is wrong, in words. Beyond a number of problems no more are kept."""

    problems: list[str] = field(default_factory=list)

    def object_to(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


@dataclass
class ServerVerdict(Findings):
    """What one server did, in numbers. If it holds a range of θ, a commit is what it gets of one, θ is its part.

    Attributes:
        acknowledged: Commits that a worker was told are applied.
        applied: Commits in the log: the last version.
        resent: Commits that their workers had to try more than once.
        lost: Acknowledged commits that are not in the log, or not as the version that was told.
        doubled: Commits that are in the log more than once.
        strange: Commits in the log that nobody sent, or with another gradient, base or share.
        smaller: Commits in the log that count less than a whole batch.
        released: Replies in the log that had been held for other workers' commits.
        thetas_seen: Times that a worker was given θ.
        thetas_wrong: Of these, how often it was not the replayed one.
        shards_completed: Acknowledged ones.
        checkpoints: Checkpoints compared with the replay.
        checkpoints_wrong: Of these, how many differ from it.
        theta_equal: Whether the final θ is the replay's, to the bit.
    """

    acknowledged: int = 0
    applied: int = 0
    resent: int = 0
    lost: int = 0
    doubled: int = 0
    strange: int = 0
    smaller: int = 0
    released: int = 0
    thetas_seen: int = 0
    thetas_wrong: int = 0
    shards_completed: int = 0
    checkpoints: int = 0
    checkpoints_wrong: int = 0
    theta_equal: bool = False

    @property
    def good(self) -> bool:
        return self.theta_equal and not self.problems


@dataclass
class Testimony:
    """The workers' records of what they sent to one server and got from it.

    Attributes:
        tries: How often each commit was tried.
        sent: The gradients' CRC-32 (None where not told), base versions and shares of a batch of each.
        acknowledged: The version and staleness that each was told, once for each answer.
        replies: The θ for the next gradient that came with each, which may lie ahead of θ: base version, dtype, CRC-32.
        pulled: Each θ that was pulled: version, dtype, CRC-32.
        completed: Shards that were told to be done: lease and shard.
    """

    tries: Counter[Known] = field(default_factory=Counter)
    sent: dict[Known, set[tuple[int | None, int, float]]] = field(default_factory=dict)
    acknowledged: dict[Known, set[tuple[int, int]]] = field(default_factory=dict)
    replies: dict[Known, list[tuple[int, str, int]]] = field(default_factory=dict)
    pulled: list[tuple[int, str, int]] = field(default_factory=list)
    completed: set[tuple[str, int]] = field(default_factory=set)

    def hear(self, line: dict[str, Any]) -> None:
        known = (line.get("lease", ""), line.get("sequence", 0))
        if line["event"] == "try":
            self.tries[known] += 1
            self.sent.setdefault(known, set()).add((line["gradient"], line["base"], line["share"]))
        elif line["event"] == "ack":
            self.acknowledged.setdefault(known, set()).add((line["version"], line["staleness"]))
            self.replies.setdefault(known, []).append((line["base"], line["dtype"], line["theta"]))
        elif line["event"] == "read":
            self.pulled.append((line["version"], line["dtype"], line["theta"]))
        elif line["event"] == "completed":
            self.completed.add((line["lease"], line["shard"]))


@dataclass
class LogContent:
    """What one server's log tells of the run, as far as other servers' logs must agree with it.

    Attributes:
        state: The first checkpoint's state.
        size: Number of elements of θ that the server holds.
        applied: The version after each commit.
        completed: Shards, as lease and shard; how often each is completed.
        opened: Leases.
    """

    state: dict[str, Any]
    size: int
    applied: dict[Known, int] = field(default_factory=dict)
    completed: Counter[tuple[str, int]] = field(default_factory=Counter)
    opened: set[str] = field(default_factory=set)


def check_server(checkpoints: Path, told: Testimony) -> tuple[ServerVerdict, LogContent | None]:
    """Checks a server of a run that ended gracefully, and of which no checkpoint and no part of the log was removed. Returns
    what its log tells, too, up to where it is broken; None if not even that is known."""
    verdict, content = ServerVerdict(), None
    verdict.acknowledged, verdict.resent = len(told.acknowledged), sum(tries > 1 for tries in told.tries.values())
    verdict.thetas_seen = len(told.pulled) + sum(map(len, told.replies.values()))
    verdict.shards_completed = len(told.completed)
    try:
        judge = _Judge(verdict, told, checkpoints)
        content = judge.content
        judge.hold_court()
    except (BrokenLog, Contradiction, ValueError, KeyError, OSError) as error:
        verdict.object_to(f"{type(error).__name__}: {error}")
    return verdict, content


def lines_of(diary: Path) -> list[dict[str, Any]]:
    *lines, _ = diary.read_bytes().split(b"\n")  # the last may have been cut short with its worker
    return [json.loads(line) for line in lines]


def testimony(lines: Iterable[dict[str, Any]], server: int) -> Testimony:
    """What the diaries' lines tell of the server of one range; shards are range 0's."""
    told = Testimony()
    for line in lines:
        if line.get("range", 0) == server:
            told.hear(line)
    return told


class _Judge:
    def __init__(self, verdict: ServerVerdict, told: Testimony, folder: Path) -> None:
        self._verdict = verdict
        self._told = told
        self._folder = folder
        paths = sorted(folder.glob("checkpoint-*"), key=lambda path: tuple(map(int, path.name.split("-")[1:])))
        if not paths:
            raise ValueError(f"there is no checkpoint in {folder}")
        start = Checkpoint(paths[0])
        if start.state["version"]:
            raise ValueError(f"the first checkpoint is of version {start.state['version']}: the run's beginning is gone")
        if any(worker.moment.any() for worker in start.workers.values()):
            raise ValueError("the first checkpoint has momentum, though nothing was committed before it")
        self._run_id, self._first = start.state["run_id"], start.number + 1
        self.content = LogContent(start.state, start.theta.size, opened=set(start.workers))
        self._replay = Replay(start)
        self._due: dict[int, list[Path]] = {}  # checkpoints by the number of the record that they follow
        for path in paths:
            self._due.setdefault(_number(path), []).append(path)
        self._last = paths[-1]
        self._applied, self._completed = self.content.applied, self.content.completed
        self._replies = dict(told.replies)
        self._smallest = start.state["hyperparameters"]["smallest_share"]
        self._wanted: dict[int, set[tuple[str, int]]] = {}
        for version, dtype, check in told.pulled:
            self._wanted.setdefault(version, set()).add((dtype, check))

    def hold_court(self) -> None:
        self._look(self._first - 1)
        for entry in entries(self._folder / "log", self._run_id, self._first):
            before = self._replay.version
            if entry.kind in ("committed", "pulled", "ended"):
                self._compare_reply(entry.fields["lease"])
            self._replay.happens(entry)
            if entry.kind == "committed":
                self._commit(entry)
            elif entry.kind == "released":
                self._verdict.released += len(entry.fields["leases"])
            elif entry.kind == "completed":
                self._completed[entry.fields["lease"], entry.fields["shard"]] += 1
            elif entry.kind == "opened":
                self.content.opened.add(entry.fields["lease"])
            self._look(entry.number, moved=self._replay.version != before)
        for lease in self._replay.workers:
            self._compare_reply(lease)
        self._verdict.applied = self._replay.version
        self._judge_promises()
        self._judge_end()

    def _commit(self, entry: Entry) -> None:
        fields, verdict = entry.fields, self._verdict
        known, version = (fields["lease"], fields["sequence"]), fields["version"]
        if known in self._applied:
            verdict.doubled += 1
            verdict.object_to(f"{known} is applied as version {self._applied[known]} and as version {version}")
        elif fields["sequence"] != 1 and (fields["lease"], fields["sequence"] - 1) not in self._applied:
            verdict.object_to(f"version {version} is {known}, and the commit before that is not applied")
        self._applied[known] = version
        verdict.smaller += fields["weight"] < 1
        gradient = zlib.crc32(decoded(fields["dtype"], entry.payload, self._replay.theta.size).tobytes())
        sent = self._told.sent.get(known, set())
        if (fields["base_version"], fields["weight"]) not in {
            (base, self._weight(share)) for check, base, share in sent if check in (gradient, None)
        }:
            verdict.strange += 1
            verdict.object_to(f"version {version} ({known}) is no commit that any worker sent")

    def _weight(self, share: float) -> float:
        """What a commit that names this share of a batch counts; 0 if it names none."""
        return min(1.0, max(self._smallest, share or 1.0)) if self._smallest < 1 else 1.0

    def _look(self, number: int, moved: bool = True) -> None:
        """Compares what the workers saw after a record with the replay."""
        if moved:
            self._compare_seen()
        for path in self._due.pop(number, []):
            self._verdict.checkpoints += 1
            if difference := _difference(Checkpoint(path), self._replay):
                self._verdict.checkpoints_wrong += 1
                self._verdict.object_to(f"{path.name} is not the replay at record {number}: {difference}")

    def _compare_seen(self) -> None:
        seen = self._wanted.pop(self._replay.version, set())
        for dtype, check in seen:
            if check != _crc(self._replay.theta, dtype):
                self._verdict.thetas_wrong += 1
                self._verdict.object_to(
                    f"a worker saw a θ of version {self._replay.version} ({dtype}) that is not the replay's"
                )

    def _compare_reply(self, lease: str) -> None:
        """Compares the last reply of a lease, which changes now, with the replay's. It may have been held, and made again."""
        worker = self._replay.workers.get(lease)
        if worker is None:
            return
        for base, dtype, check in self._replies.pop((lease, worker.sequence), []):
            if (base, check) != (worker.base, _crc(worker.snapshot, dtype)):
                self._verdict.thetas_wrong += 1
                self._verdict.object_to(f"the reply to commit {worker.sequence} of {lease} ({dtype}) is not the replay's")

    def _judge_promises(self) -> None:
        verdict = self._verdict
        for known, answers in self._told.acknowledged.items():
            version = self._applied.get(known)
            if {told for told, _ in answers} != {version} or len(answers) > 1:
                verdict.lost += 1
                verdict.object_to(f"{known} was acknowledged as {sorted(answers)}; in the log it is {version}")
        for version in self._wanted:
            verdict.thetas_wrong += 1
            verdict.object_to(f"a worker saw version {version}; the run ends at {self._replay.version}")
        for shard in self._told.completed:
            if self._completed[shard] != 1:
                verdict.object_to(f"shard {shard} was acknowledged, and is in the log {self._completed[shard]} times")
        if again := [shard for shard, times in Counter(shard for _, shard in self._completed.elements()).items() if times > 1]:
            verdict.object_to(f"shards are completed more than once: {again}")

    def _judge_end(self) -> None:
        for number, paths in self._due.items():
            self._verdict.object_to(f"{paths[0].name} follows record {number}, which the log lacks")
        last = Checkpoint(self._last)
        self._verdict.theta_equal = last.theta.tobytes() == self._replay.theta.tobytes()
        if (last.state["version"], last.state["steps_done"]) != (self._replay.version, dict(self._replay.steps)):
            self._verdict.object_to(f"the last checkpoint is of version {last.state['version']}, not {self._replay.version}")
        if last.state["ledger"]["completed"] != self._completed.total():
            self._verdict.object_to(f"{self._completed.total()} shards are completed, the last checkpoint has another number")


def _number(path: Path) -> int:
    return int(json.loads((path / "state.json").read_text(encoding="utf-8"))["log"][1])


def _difference(checkpoint: Checkpoint, replay: Replay) -> str:
    """How a checkpoint differs from the replay; empty if it does not."""
    if checkpoint.state["version"] != replay.version:
        return f"its version is {checkpoint.state['version']}, not {replay.version}"
    if checkpoint.theta.tobytes() != replay.theta.tobytes():
        return "θ"
    for name in ("progress", "rounds"):
        if checkpoint.state[name] != getattr(replay, name):
            return f"{name}: {checkpoint.state[name]}, not {getattr(replay, name)}"
    for name, buffer in checkpoint.shared.items():
        if _bytes(buffer) != _bytes(replay.shared[name]):
            return name
    if checkpoint.workers.keys() != replay.workers.keys():
        return f"leases {sorted(checkpoint.workers.keys() ^ replay.workers.keys())}"
    for lease, kept in checkpoint.workers.items():
        mine = replay.workers[lease]
        for name in ("name", "sequence", "base", "progress", "reply_progress"):
            if getattr(kept, name) != getattr(mine, name):
                return f"{name} of lease {lease}: {getattr(kept, name)}, not {getattr(mine, name)}"
        for name in ("moment", "snapshot", "spare"):
            if _bytes(getattr(kept, name)) != _bytes(getattr(mine, name)):
                return f"{name} of lease {lease}"
    return ""


def _bytes(values: Floats | None) -> bytes:
    return values.tobytes() if values is not None else b""


def _crc(theta: Floats, dtype: str) -> int:
    return zlib.crc32((as_bfloat16(theta) if dtype == "bfloat16" else theta).tobytes())
