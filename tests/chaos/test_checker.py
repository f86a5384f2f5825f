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


def test_an_honest_run_is_found_good(left: Left) -> None:
    verdict, servers = left.judge(), len(left.folders)
    made = STEPS * len(FORMATS) + 1
    assert verdict.good, verdict.all_problems()
    assert (verdict.committed, verdict.whole) == (made, made + (servers == 1))
    assert (verdict.torn, verdict.torn_by_range) == (({}, [0]) if servers == 1 else ({Fate.KILLED: 1}, [1, 0]))
    assert verdict.versions_at_rest == [made + 1, made][:servers]
    assert verdict.shards_completed == STEPS // 2
    assert all(server.checkpoints >= 2 and server.thetas_seen >= made for server in verdict.ranges)


# -- what a checker must find

FAULTS: list[Any] = []  # each with the number of servers, the words that name it, and the counter that has it


def fault(words: str, counter: str = "", servers: int = 1) -> Callable[[Callable[[Left], None]], Callable[[Left], None]]:
    """Adds a change of what a run left."""

    def add(plant: Callable[[Left], None]) -> Callable[[Left], None]:
        FAULTS.append(pytest.param(plant, servers, words, counter, id=plant.__name__))
        return plant

    return add


@fault("was acknowledged as", "lost")
def acknowledges_a_commit_that_the_log_lacks(left: Left) -> None:
    left.tell({**left.last_answer(), "sequence": STEPS + 1, "version": 1000})


@fault("is applied as version", "doubled")
def applies_a_commit_twice(left: Left) -> None:
    def twice(records: list[Record]) -> list[Record]:
        at = last_commit(records)
        again = records[at]._replace(fields={**records[at].fields, "version": records[at].fields["version"] + 1})
        return [*records[: at + 1], again, *records[at + 1 :]]

    left.change(twice)


@fault("is no commit that any worker sent", "strange")
def changes_a_gradient(left: Left) -> None:
    records = records_of(left.folders[-1] / "log")
    at = max(at for at, each in enumerate(records) if is_commit(each) and each.fields["dtype"] == 1)
    records[at] = records[at]._replace(payload=(bytes(len(records[at].payload[0])),))
    left.change(lambda _: records)


@fault("which the log lacks")
def damages_a_record(left: Left) -> None:
    path = left.folders[-1] / "log" / segment.name(1)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"GEMr", 0, content.rindex(b"GEMr"))] ^= 1
    path.write_bytes(content)


def flips_a_bit_of(file: str, tensor: str) -> Callable[[Left], None]:
    def plant(left: Left) -> None:
        path = max(left.folders[-1].glob("checkpoint-*")) / f"{file}.safetensors"
        tensors = load_file(path)
        changed = next(values for name, values in tensors.items() if name.rpartition("/")[2] == tensor)
        changed.reshape(-1).view(np.uint32)[0] ^= 1
        save_file(tensors, path)

    plant.__name__ = f"flips_a_bit_of_{tensor}"
    return plant


for file, tensor in (("model", "bias"), ("workers", "moment"), ("workers", "snapshot")):
    fault("is not the replay at record", "checkpoints_wrong")(flips_a_bit_of(file, tensor))


@fault("a worker saw a θ of version 3", "thetas_wrong")
def shows_a_theta_that_never_was(left: Left) -> None:
    left.tell({"event": "read", "lease": left.last_answer()["lease"], "version": 3, "theta": 1, "dtype": "float32"})


@fault("the reply to commit", "thetas_wrong")
def replies_with_another_theta(left: Left) -> None:
    left.tell({**left.last_answer(), "theta": 1})


@fault("is in the log 0 times")
def acknowledges_a_shard_that_the_log_lacks(left: Left) -> None:
    tell(left.diaries[0], {"event": "completed", "lease": left.last_answer()["lease"], "shard": 4})


@fault("samples were acknowledged")
def completes_a_shard_without_a_commit(left: Left) -> None:
    kept = [line for line in lines_in(left.diaries[4]) if not (line["event"] == "committed" and line["sequence"] == 1)]
    left.diaries[4].unlink()
    for line in kept:
        tell(left.diaries[4], line)


# -- several servers


@fault("was acknowledged before ranges [1] had answered", servers=2)
def acknowledges_a_torn_commit(left: Left) -> None:
    tell(left.killed, {"event": "committed", **left.torn(), "batches": []})


@fault(Fate.LEFT, servers=2)
def tears_the_commit_of_a_worker_that_left_in_order(left: Left) -> None:
    tell(left.killed, {"event": "closed"})


@fault("its lease went on", servers=2)
def tears_a_commit_in_the_middle_of_a_lease(left: Left) -> None:
    lease = left.torn()["lease"]
    left.change(lambda records: [each for each in records if not (is_commit(each) and each.fields["lease"] == lease)])


@fault("something else than its part", servers=2)
def sends_another_part_of_the_gradient(left: Left) -> None:
    sending = next(line for line in lines_in(left.diaries[0]) if line["event"] == "sending")
    tell(left.diaries[0], {**sending, "parts": sending["parts"][::-1]})


@pytest.mark.parametrize(("plant", "left", "words", "counter"), FAULTS, indirect=["left"])
def test_a_fault_is_found(plant: Callable[[Left], None], left: Left, words: str, counter: str) -> None:
    plant(left)
    verdict = left.judge()
    assert not verdict.good
    assert any(words in problem for problem in verdict.all_problems()), verdict.all_problems()
    assert not counter or getattr(verdict.ranges[-1], counter) == 1


@pytest.mark.parametrize("left", [2], indirect=True)
def test_a_torn_commit_of_a_lease_that_ended_is_counted_as_such(left: Left) -> None:
    tell(left.killed, {"event": "read", "range": 0, "lease": "another", "version": 10**6, "theta": 1, "dtype": "float32"})
    assert left.judge().torn == {Fate.ENDED: 1}
