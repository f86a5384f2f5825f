"""The comparison of ranges finds what it is there to find: each fault is planted in what an honest run on two servers left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gem_client
import numpy as np
import pytest
from chaos.planting import is_commit, last_commit, lines_in, records_of, rewrite, tell
from chaos.ranges import Fate, RangesVerdict, check_ranges
from chaos.worker import Diary, Gradients, Kind, observe
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import Range
from gem_server.core.records import Record
from kit.server import Live, config, serving

MODEL = {"bias": np.ones(3000, np.float32), "weight": np.ones((60, 100), np.float32)}  # the cut at 4096 goes through "weight"
PARAMETERS, STEPS = 9000, 4
FORMATS = [Kind(), Kind(gradient_dtype="int8"), Kind(overlap=True), Kind(shards=True)]
SETTINGS = Hyperparameters(shard_size=32, batch_size=16, epochs=10)


class Left:
    """What a run left: two servers' folders, and a diary for each worker. The last one's was killed."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "range-0", folder / "range-1"]
        self.logs = [each / "log" for each in self.folders]
        self.diaries = [folder / f"{number}.jsonl" for number in range(len(FORMATS) + 1)]
        self.versions: list[int] = []

    @property
    def killed(self) -> Path:
        """The diary of the worker that was killed."""
        return self.diaries[-1]

    def judge(self) -> RangesVerdict:
        return check_ranges(self.folders, self.diaries, self.versions)

    def change(self, index: int, change: Callable[[list[Record]], list[Record]]) -> None:
        """Changes the records of a range."""
        rewrite(self.logs[index], change(records_of(self.logs[index])))

    def torn(self) -> dict[str, Any]:
        """The commit that the killed worker was sending: lease and sequence."""
        last = [line for line in lines_in(self.killed) if line["event"] == "sending"][-1]
        return {"lease": last["lease"], "sequence": last["sequence"]}


@contextlib.contextmanager
def two_servers(left: Left) -> Iterator[list[Live]]:
    changes: dict[str, Any] = {"durability": "log", "checkpoint_keep": 1000}
    with (
        serving(config(SETTINGS, checkpoint_dir=left.folders[1], range=Range(1, 2), **changes)) as second,
        serving(
            config(SETTINGS, checkpoint_dir=left.folders[0], range=Range(0, 2), peers=(second.address,), **changes)
        ) as first,
    ):
        yield [first, second]


def join(address: str, diary: Path, kind: Kind) -> gem_client.Session:
    session = gem_client.connect(address, shared_memory=False, gradient_dtype=kind.gradient_dtype)
    observe(session, Diary(diary), kind)
    session.join(MODEL, overlap=kind.overlap)
    return session


def train(session: gem_client.Session, kind: Kind, gradients: Gradients) -> None:
    if kind.shards:
        for _, _ in zip(range(STEPS), session.shards(64), strict=False):
            session.commit(gradients(), loss=1.0)
        return
    base = session.base
    for _ in range(STEPS):
        at_hand = session.base
        session.commit(gradients(), base=base if kind.overlap else None)
        base = at_hand


def commit_to_lead_alone(session: gem_client.Session, gradient: Any) -> None:
    """Sends the lead its part of a commit, then disappears: as a worker that is killed in between."""
    sender, member = session._sender, session._member

    def to_lead(work: Callable[[Any], Any]) -> Any:
        work(member.links.lead)
        raise KeyboardInterrupt

    member.links.at_once = to_lead  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        sender.send(gradient, "gradient", None, 1, session.base)
    member.links.stop()
    member.links.close()


@pytest.fixture
def left(tmp_path: Path) -> Left:
    """A worker in each format, one after the other, and one that was killed between the ranges."""
    left = Left(tmp_path)
    with two_servers(left) as lives:
        sessions = [join(lives[0].address, diary, kind) for diary, kind in zip(left.diaries, [*FORMATS, Kind()], strict=True)]
        for number, (session, kind) in enumerate(zip(sessions, FORMATS, strict=False)):
            train(session, kind, Gradients(PARAMETERS, number))
        sessions[-1].commit(Gradients(PARAMETERS, 100)())
        commit_to_lead_alone(sessions[-1], Gradients(PARAMETERS, 101)())
        for session, diary in zip(sessions[:-1], left.diaries, strict=False):
            session.close()
            Diary(diary).note(event="closed")
        left.versions = [live.core.central.version for live in lives]  # at rest
    return left


def test_an_honest_run_is_found_good(left: Left) -> None:
    verdict = left.judge()
    commits = STEPS * len(FORMATS) + 1
    assert verdict.good, verdict.all_problems()
    assert (verdict.committed, verdict.whole) == (commits, commits)
    assert (verdict.torn, verdict.torn_by_range) == ({Fate.KILLED: 1}, [1, 0])
    assert verdict.versions_at_rest == [commits + 1, commits]
    assert verdict.shards_completed == STEPS // 2
    assert all(of_range.checkpoints >= 2 and of_range.thetas_seen >= commits for of_range in verdict.ranges)


def test_a_commit_that_one_range_has_twice_is_doubled(left: Left) -> None:
    def twice(records: list[Record]) -> list[Record]:
        at = last_commit(records)
        again = records[at]._replace(fields={**records[at].fields, "version": records[at].fields["version"] + 1})
        return [*records[: at + 1], again, *records[at + 1 :]]

    left.change(1, twice)
    verdict = left.judge()
    assert [of_range.doubled for of_range in verdict.ranges] == [0, 1]
    assert not verdict.ranges[1].theta_equal


def test_an_acknowledged_commit_that_one_range_lacks_is_lost_and_no_torn_one(left: Left) -> None:
    left.change(1, lambda records: records[: last_commit(records)])
    verdict = left.judge()
    assert [of_range.lost for of_range in verdict.ranges] == [0, 1]
    assert any("was acknowledged, and is in the ranges [0] only" in problem for problem in verdict.problems)


def test_a_torn_commit_that_was_acknowledged_is_found(left: Left) -> None:
    tell(left.killed, {"event": "committed", **left.torn(), "batches": []})
    verdict = left.judge()
    assert all(of_range.good for of_range in verdict.ranges)
    assert any("was acknowledged before ranges [1] had answered" in problem for problem in verdict.problems)
    assert any("was acknowledged, and is in the ranges [0] only" in problem for problem in verdict.problems)


def test_a_torn_commit_of_a_worker_that_left_in_order_is_found(left: Left) -> None:
    tell(left.killed, {"event": "closed"})
    assert any(Fate.LEFT in problem for problem in left.judge().problems)


def test_a_torn_commit_of_a_lease_that_ended_is_counted_as_such(left: Left) -> None:
    tell(left.killed, {"event": "read", "range": 0, "lease": "another", "version": 10**6, "theta": 1, "dtype": "float32"})
    assert left.judge().torn == {Fate.ENDED: 1}


def test_a_torn_commit_in_the_middle_of_a_lease_is_found(left: Left) -> None:
    def without_first(records: list[Record]) -> list[Record]:
        lease = left.torn()["lease"]
        return [each for each in records if not (is_commit(each) and each.fields["lease"] == lease)]

    left.change(1, without_first)
    assert any("its lease went on" in problem for problem in left.judge().problems)


def test_versions_at_rest_that_the_logs_do_not_have_are_found(left: Left) -> None:
    left.versions[1] += 1
    assert any("at rest" in problem for problem in left.judge().problems)


def test_another_part_of_the_gradient_is_found(left: Left) -> None:
    lines = lines_in(left.diaries[0])
    sending = next(line for line in lines if line["event"] == "sending")
    tell(left.diaries[0], {**sending, "parts": sending["parts"][::-1]})
    verdict = left.judge()
    assert sum("something else than its part" in problem for problem in verdict.problems) == 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_that_is_completed_without_its_commits_is_found(left: Left, index: int) -> None:
    """Range 0 completes a shard whose commit nobody acknowledged; range 1 completes one at all."""
    completed = next(record for record in records_of(left.logs[0]) if record.kind == "completed")
    if index == 0:
        kept = [line for line in lines_in(left.diaries[3]) if not (line["event"] == "committed" and line["sequence"] == 1)]
        left.diaries[3].unlink()
        for line in kept:
            tell(left.diaries[3], line)
    else:
        left.change(1, lambda records: [*records[:-5], completed, *records[-5:]])
    verdict = left.judge()
    expected = "samples were acknowledged" if index == 0 else "range 1 has completed shards"
    assert any(expected in problem for problem in verdict.problems), verdict.problems


def test_ranges_of_two_runs_are_found(left: Left, tmp_path: Path) -> None:
    other = Left(tmp_path / "other")
    with two_servers(other) as lives:
        join(lives[0].address, other.diaries[0], Kind()).close()
    verdict = check_ranges([left.folders[0], other.folders[1]], left.diaries)
    assert any("belongs to run" in problem for problem in verdict.problems)


def test_a_range_without_files_is_found(left: Left, tmp_path: Path) -> None:
    verdict = check_ranges([left.folders[0], tmp_path / "nothing"], left.diaries)
    assert not verdict.good
    assert "there is no checkpoint" in verdict.ranges[1].problems[0]
