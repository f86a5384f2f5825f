"""The checker finds what it is there to find: each fault is planted in what an honest run on one server or two left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import gem_client
import numpy as np
import pytest
from chaos.checker import Fate, Verdict, check
from chaos.planting import is_commit, last_commit, lines_in, records_of, rewrite, tell
from chaos.worker import Diary, Gradients, Kind, observe
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import Range
from gem_client.run.link import Link
from gem_client.run.pending_commit import PendingCommit
from gem_server.core.records import Record
from gem_server.durability import segment
from kit.server import Live, config, serving
from safetensors.numpy import load_file, save_file

MODEL = {"bias": np.ones(3000, np.float32), "weight": np.ones((60, 100), np.float32)}  # the cut at 4096 goes through "weight"
PARAMETERS, STEPS = 9000, 4
FORMATS = [
    Kind(),
    Kind(gradient_dtype="int8"),
    Kind(gradient_dtype="bfloat16", theta_dtype="bfloat16"),
    Kind(overlap=True),
    Kind(shards=True),
]
SETTINGS = Hyperparameters(shard_size=32, batch_size=16, epochs=10)


class Left:
    """What a run left: a folder for each server, and a diary for each worker. The last worker was killed."""

    def __init__(self, folder: Path, servers: int, versions: list[int]) -> None:
        self.folders = [folder / f"range-{index}" for index in range(servers)]
        self.diaries = [folder / f"{number}.jsonl" for number in range(len(FORMATS) + 1)]
        self.versions = versions

    @property
    def killed(self) -> Path:
        """The diary of the worker that was killed."""
        return self.diaries[-1]

    def judge(self) -> Verdict:
        return check(self.folders, self.diaries, self.versions)

    def change(self, change: Callable[[list[Record]], list[Record]]) -> None:
        """Changes the records of the last server."""
        log = self.folders[-1] / "log"
        rewrite(log, change(records_of(log)))

    def tell(self, line: dict[str, Any]) -> None:
        """Has the first worker say something more of the last server."""
        tell(self.diaries[0], {"range": len(self.folders) - 1, **line})

    def last_answer(self) -> dict[str, Any]:
        """The first worker's last, by the last server."""
        index = len(self.folders) - 1
        return next(
            line for line in reversed(lines_in(self.diaries[0])) if line["event"] == "ack" and line.get("range", 0) == index
        )

    def torn(self) -> dict[str, Any]:
        """The commit that the killed worker was sending: lease and sequence."""
        last = [line for line in lines_in(self.killed) if line["event"] == "sending"][-1]
        return {"lease": last["lease"], "sequence": last["sequence"]}


# -- an honest run


@contextlib.contextmanager
def running(left: Left) -> Iterator[list[Live]]:
    changes: dict[str, Any] = {"durability": "log", "checkpoint_keep": 1000}
    count, peers = len(left.folders), tuple[str, ...]()
    with contextlib.ExitStack() as stack:
        lives: list[Live] = []
        for index in reversed(range(count)):
            changes |= {"range": Range(index, count), "peers": () if index else peers, "checkpoint_dir": left.folders[index]}
            live = stack.enter_context(serving(config(SETTINGS, **changes)))
            lives.insert(0, live)
            peers = (live.address, *peers)
        yield lives


def join(address: str, diary: Path, kind: Kind) -> gem_client.Session:
    formats: dict[str, Any] = {"gradient_dtype": kind.gradient_dtype, "theta_dtype": kind.theta_dtype}
    session = gem_client.connect(address, shared_memory=False, **formats)
    observe(session, Diary(diary), kind)
    session.join(MODEL, overlap=kind.overlap)
    return session


def commits(session: gem_client.Session, kind: Kind, gradients: Gradients) -> Iterator[None]:
    """Makes one commit after the other."""
    batches, base = iter(session.shards(64) if kind.shards else ()), session.base
    for _ in range(STEPS):
        next(batches, None)
        at_hand = session.base
        session.commit(gradients(), base=base if kind.overlap else None)
        base = at_hand
        yield


def commit_to_leader_alone(session: gem_client.Session, gradient: Any) -> None:
    """Sends the leader its part of a commit, then disappears: as a worker that is killed in between."""
    member = session._member

    def to_leader(work: Callable[[Any], Any]) -> Any:
        work(member.links.leader)
        raise KeyboardInterrupt

    member.links.at_once = to_leader  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        member.commit(PendingCommit("gradient", None, 1, session.base, gradient))
    member.links.stop()
    member.links.close()


def honest(folder: Path, servers: int) -> Left:
    """Workers that took turns to commit, one in each format, and one killed once the leader had its part of a commit."""
    left = Left(folder, servers, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_ALLOCATION", 1 << 16)  # it is copied for each test
        patch.setattr(Link, "attempt", Link.attempt)  # which `observe` replaces
        with running(left) as lives:
            sessions = [
                join(lives[0].address, diary, kind) for diary, kind in zip(left.diaries, [*FORMATS, Kind()], strict=True)
            ]
            *training, last = sessions
            turns = [
                commits(session, kind, Gradients(PARAMETERS, number))
                for number, (session, kind) in enumerate(zip(training, FORMATS, strict=True))
            ]
            for _ in range(STEPS):
                for turn in turns:
                    next(turn, None)
            last.commit(Gradients(PARAMETERS, 100)())
            commit_to_leader_alone(last, Gradients(PARAMETERS, 101)())
            staying = training[FORMATS.index(Kind(overlap=True))]  # the last checkpoint holds it
            for session, diary in zip(training, left.diaries, strict=False):
                Diary(diary).note(event="closed")
                if session is not staying:
                    session.close()
            left.versions = [live.core.central.version for live in lives]  # at rest
        staying.close()
    return left


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Left]:
    folder = tmp_path_factory.mktemp("honest")
    return {servers: honest(folder / str(servers), servers) for servers in (1, 2)}


@pytest.fixture(params=[1, 2], ids=["one server", "two servers"])
def left(request: pytest.FixtureRequest, runs: dict[int, Left], tmp_path: Path) -> Left:
    """A copy of what an honest run left."""
    copytree(runs[request.param].folders[0].parent, tmp_path / "left")
    return Left(tmp_path / "left", request.param, list(runs[request.param].versions))


two_servers = pytest.mark.parametrize("left", [2], indirect=True, ids=["two servers"])


def test_an_honest_run_is_found_good(left: Left) -> None:
    verdict, servers = left.judge(), len(left.folders)
    made = STEPS * len(FORMATS) + 1
    assert verdict.good, verdict.all_problems()
    assert (verdict.committed, verdict.whole) == (made, made + (servers == 1))
    assert (verdict.torn, verdict.torn_by_range) == (({}, [0]) if servers == 1 else ({Fate.KILLED: 1}, [1, 0]))
    assert verdict.versions_at_rest == [made + 1, made][:servers]
    assert verdict.shards_completed == STEPS // 2
    assert all(server.checkpoints >= 2 and server.thetas_seen >= made for server in verdict.ranges)


# -- a server's log and checkpoints, and what workers were told of them


def test_an_acknowledged_commit_that_the_log_lacks_is_lost(left: Left) -> None:
    left.tell({**left.last_answer(), "sequence": STEPS + 1, "version": 1000})
    assert left.judge().ranges[-1].lost == 1


def test_an_acknowledgement_as_another_version_is_lost(left: Left) -> None:
    answer = left.last_answer()
    left.tell({**answer, "version": answer["version"] - 1})
    assert left.judge().ranges[-1].lost == 1


def test_a_log_without_its_last_commits_is_found(left: Left) -> None:
    def cut(records: list[Record]) -> list[Record]:
        at = max(at for at, each in enumerate(records) if is_commit(each) and each.fields["lease"] != left.torn()["lease"])
        return records[:at]

    left.change(cut)
    verdict = left.judge()
    assert verdict.ranges[-1].lost >= 1
    assert not verdict.ranges[-1].theta_equal
    if len(left.folders) > 1:
        assert any("was acknowledged, and is in the ranges [0] only" in problem for problem in verdict.problems)


def test_a_commit_that_is_applied_twice_is_doubled(left: Left) -> None:
    def twice(records: list[Record]) -> list[Record]:
        at = last_commit(records)
        again = records[at]._replace(fields={**records[at].fields, "version": records[at].fields["version"] + 1})
        return [*records[: at + 1], again, *records[at + 1 :]]

    left.change(twice)
    verdict = left.judge()
    assert [server.doubled for server in verdict.ranges] == [0, 1][-len(left.folders) :]
    assert not verdict.ranges[-1].theta_equal


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda record: record._replace(payload=(bytes(len(record.payload[0])),)), id="gradient"),
        pytest.param(
            lambda record: record._replace(fields={**record.fields, "base_version": record.fields["base_version"] - 1}),
            id="base",
        ),
        pytest.param(lambda record: record._replace(fields={**record.fields, "weight": 0.5}), id="share"),
    ],
)
def test_a_commit_that_is_not_as_it_was_sent_is_strange(left: Left, change: Callable[[Record], Record]) -> None:
    def another(records: list[Record]) -> list[Record]:
        at = next(
            at for at in range(last_commit(records), 0, -1) if is_commit(records[at]) and records[at].fields["dtype"] == 1
        )
        return [*records[:at], change(records[at]), *records[at + 1 :]]

    left.change(another)
    assert left.judge().ranges[-1].strange == 1


def test_a_hole_in_the_log_is_found(left: Left) -> None:
    path = left.folders[-1] / "log" / segment.name(1)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"GEMr", 0, content.rindex(b"GEMr"))] ^= 1
    path.write_bytes(content)
    verdict = left.judge()
    assert not verdict.good
    assert verdict.ranges[-1].problems


@pytest.mark.parametrize(
    ("file", "tensor"), [("model", "any"), ("workers", "moment"), ("workers", "snapshot"), ("workers", "spare_snapshot")]
)
def test_a_checkpoint_that_is_not_the_replay_to_the_bit_is_found(left: Left, file: str, tensor: str) -> None:
    path = max(left.folders[-1].glob("checkpoint-*")) / f"{file}.safetensors"
    tensors = load_file(path)
    changed = next(values for name, values in tensors.items() if file == "model" or name.rpartition("/")[2] == tensor)
    changed.reshape(-1).view(np.uint32)[0] ^= 1
    save_file(tensors, path)
    verdict = left.judge().ranges[-1]
    assert verdict.checkpoints_wrong == 1
    assert verdict.theta_equal == (file == "workers")


def test_a_run_that_begins_with_momentum_is_found(left: Left) -> None:
    path = min(left.folders[-1].glob("checkpoint-*")) / "workers.safetensors"
    tensors = load_file(path)
    next(values for name, values in tensors.items() if name.endswith("/moment"))[0] = 1
    save_file(tensors, path)
    assert not left.judge().good


@pytest.mark.parametrize("version", [3, 1000], ids=["that had another", "that was never reached"])
def test_a_theta_that_no_version_had_is_found(left: Left, version: int) -> None:
    left.tell({"event": "read", "lease": left.last_answer()["lease"], "version": version, "theta": 1, "dtype": "float32"})
    assert left.judge().ranges[-1].thetas_wrong == 1


def test_a_reply_that_is_not_the_replay_to_the_bit_is_found(left: Left) -> None:
    left.tell({**left.last_answer(), "theta": 1})
    assert left.judge().ranges[-1].thetas_wrong == 1


def test_a_shard_that_was_acknowledged_and_is_not_in_the_log_is_found(left: Left) -> None:
    tell(left.diaries[0], {"event": "completed", "lease": left.last_answer()["lease"], "shard": 4})
    assert not left.judge().good


# -- what all servers have together


def test_a_shard_that_is_completed_without_its_commits_is_found(left: Left) -> None:
    kept = [line for line in lines_in(left.diaries[4]) if not (line["event"] == "committed" and line["sequence"] == 1)]
    left.diaries[4].unlink()
    for line in kept:
        tell(left.diaries[4], line)
    assert any("samples were acknowledged" in problem for problem in left.judge().problems)


@two_servers
def test_a_shard_that_another_than_the_leader_completes_is_found(left: Left) -> None:
    completed = next(record for record in records_of(left.folders[0] / "log") if record.kind == "completed")
    left.change(lambda records: [*records[:-5], completed, *records[-5:]])
    assert any("range 1 has completed shards" in problem for problem in left.judge().problems)


@two_servers
def test_a_torn_commit_that_was_acknowledged_is_found(left: Left) -> None:
    tell(left.killed, {"event": "committed", **left.torn(), "batches": []})
    verdict = left.judge()
    assert all(server.good for server in verdict.ranges)
    assert any("was acknowledged before ranges [1] had answered" in problem for problem in verdict.problems)
    assert any("was acknowledged, and is in the ranges [0] only" in problem for problem in verdict.problems)


@two_servers
def test_a_torn_commit_of_a_worker_that_left_in_order_is_found(left: Left) -> None:
    tell(left.killed, {"event": "closed"})
    assert any(Fate.LEFT in problem for problem in left.judge().problems)


@two_servers
def test_a_torn_commit_of_a_lease_that_ended_is_counted_as_such(left: Left) -> None:
    tell(left.killed, {"event": "read", "range": 0, "lease": "another", "version": 10**6, "theta": 1, "dtype": "float32"})
    assert left.judge().torn == {Fate.ENDED: 1}


@two_servers
def test_a_torn_commit_in_the_middle_of_a_lease_is_found(left: Left) -> None:
    lease = left.torn()["lease"]
    left.change(lambda records: [each for each in records if not (is_commit(each) and each.fields["lease"] == lease)])
    assert any("its lease went on" in problem for problem in left.judge().problems)


def test_versions_at_rest_that_the_logs_do_not_have_are_found(left: Left) -> None:
    left.versions[-1] += 1
    assert any("at rest" in problem for problem in left.judge().problems)


@two_servers
def test_another_part_of_the_gradient_is_found(left: Left) -> None:
    sending = next(line for line in lines_in(left.diaries[0]) if line["event"] == "sending")
    tell(left.diaries[0], {**sending, "parts": sending["parts"][::-1]})
    assert sum("something else than its part" in problem for problem in left.judge().problems) == 2


@two_servers
def test_ranges_of_two_runs_are_found(left: Left, tmp_path: Path) -> None:
    other = Left(tmp_path / "other", 2, [])
    with running(other) as lives:
        join(lives[0].address, other.diaries[0], Kind()).close()
    verdict = check([left.folders[0], other.folders[1]], left.diaries)
    assert any("belongs to run" in problem for problem in verdict.problems)


def test_a_server_without_files_is_found(left: Left, tmp_path: Path) -> None:
    verdict = check([*left.folders[:-1], tmp_path / "nothing"], left.diaries)
    assert not verdict.good
    assert "there is no checkpoint" in verdict.ranges[-1].problems[0]
