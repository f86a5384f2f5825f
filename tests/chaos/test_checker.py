"""The checker finds what it is there to find: each fault is planted in what an honest run left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gem_client
import numpy as np
import pytest
from chaos.checker import Verdict, check
from chaos.planting import is_commit, last_commit, lines_in, records_of, rewrite, tell
from chaos.worker import Diary, Gradients, observe
from chaos.worker import Kind as Worker
from gem_server.core.records import Record
from gem_server.durability.segment import name
from kit.server import config, serving
from safetensors.numpy import load_file, save_file

PARAMETERS, STEPS = 600, 5
FORMATS = [
    Worker(),
    Worker(gradient_dtype="int8"),
    Worker(gradient_dtype="bfloat16", theta_dtype="bfloat16"),
    Worker(overlap=True),
]


class Left:
    """What a run left: a server's folder, and a diary for each worker."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.log = self.checkpoints / "log"
        self.diaries = [folder / f"{number}.jsonl" for number in range(len(FORMATS))]

    def judge(self) -> Verdict:
        return check(self.checkpoints, self.diaries)

    def records(self) -> list[Record]:
        return records_of(self.log)

    def rewrite(self, records: list[Record]) -> None:
        rewrite(self.log, records)

    def lines(self) -> list[dict[str, Any]]:
        return lines_in(self.diaries[0])

    def tell(self, line: dict[str, Any]) -> None:
        tell(self.diaries[0], line)

    def last_answer(self) -> dict[str, Any]:
        return next(line for line in reversed(self.lines()) if line["event"] == "ack")


@pytest.fixture
def left(tmp_path: Path) -> Left:
    """Four workers, in one format each, that took turns to commit."""
    left = Left(tmp_path)
    configuration = config(checkpoint_dir=left.checkpoints, durability="log", checkpoint_keep=1000)
    with serving(configuration) as live:
        sessions = [
            gem_client.connect(
                live.address, shared_memory=False, gradient_dtype=form.gradient_dtype, theta_dtype=form.theta_dtype
            )
            for form in FORMATS
        ]
        for session, diary, form in zip(sessions, left.diaries, FORMATS, strict=True):
            observe(session, Diary(diary), form)
            session.join({"weight": np.ones(PARAMETERS, np.float32)}, overlap=form.overlap)
        bases = [session.base for session in sessions]
        for step in range(STEPS):
            for number, (session, form) in enumerate(zip(sessions, FORMATS, strict=True)):
                at_hand = session.base
                session.commit(Gradients(PARAMETERS, 10 * step + number)(), base=bases[number] if form.overlap else None)
                bases[number] = at_hand
        *leaving, staying = sessions  # the last checkpoint holds one worker
        for session in leaving:
            session.close()
    staying.close()
    return left


def test_an_honest_run_is_found_good(left: Left) -> None:
    verdict = left.judge()
    assert verdict.good, verdict.problems
    assert verdict.acknowledged == verdict.applied == STEPS * len(FORMATS)
    assert verdict.checkpoints == 2
    assert verdict.thetas_seen >= verdict.acknowledged


def test_an_acknowledged_commit_that_the_log_lacks_is_lost(left: Left) -> None:
    left.tell({**left.last_answer(), "sequence": STEPS + 1, "version": STEPS * len(FORMATS) + 1})
    assert left.judge().lost == 1


def test_an_acknowledgement_as_another_version_is_lost(left: Left) -> None:
    answer = left.last_answer()
    left.tell({**answer, "version": answer["version"] - 1})
    assert left.judge().lost == 1


def test_a_log_without_its_last_commits_is_found(left: Left) -> None:
    records = left.records()
    left.rewrite(records[: last_commit(records)])
    verdict = left.judge()
    assert verdict.lost == 1
    assert not verdict.theta_equal


def test_a_commit_that_is_applied_twice_is_doubled(left: Left) -> None:
    records = left.records()
    at = last_commit(records)
    again = records[at]._replace(fields={**records[at].fields, "version": records[at].fields["version"] + 1})
    left.rewrite([*records[: at + 1], again, *records[at + 1 :]])
    verdict = left.judge()
    assert verdict.doubled == 1
    assert not verdict.theta_equal


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda record: record._replace(payload=(bytes(len(record.payload[0])),)), id="gradient"),
        pytest.param(
            lambda record: record._replace(fields={**record.fields, "base_version": record.fields["base_version"] - 1}),
            id="base",
        ),
    ],
)
def test_a_commit_that_is_not_as_it_was_sent_is_strange(left: Left, change: Callable[[Record], Record]) -> None:
    records = left.records()
    at = next(at for at in range(last_commit(records), 0, -1) if is_commit(records[at]) and records[at].fields["dtype"] == 1)
    left.rewrite([*records[:at], change(records[at]), *records[at + 1 :]])
    assert left.judge().strange == 1


def test_a_hole_in_the_log_is_found(left: Left) -> None:
    path = left.log / name(1)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"GEMr", 0, content.rindex(b"GEMr"))] ^= 1
    path.write_bytes(content)
    verdict = left.judge()
    assert not verdict.good
    assert verdict.problems


@pytest.mark.parametrize(
    ("file", "tensor"), [("model", "weight"), ("workers", "moment"), ("workers", "snapshot"), ("workers", "spare_snapshot")]
)
def test_a_checkpoint_that_is_not_the_replay_to_the_bit_is_found(left: Left, file: str, tensor: str) -> None:
    path = max(left.checkpoints.glob("checkpoint-*")) / f"{file}.safetensors"
    tensors = load_file(path)
    (changed,) = (values for name, values in tensors.items() if name.rpartition("/")[2] == tensor)
    changed.view(np.uint32)[0] ^= 1
    save_file(tensors, path)
    verdict = left.judge()
    assert verdict.checkpoints_wrong == 1
    assert verdict.theta_equal == (file == "workers")


def test_a_run_that_begins_with_momentum_is_found(left: Left) -> None:
    path = min(left.checkpoints.glob("checkpoint-*")) / "workers.safetensors"
    tensors = load_file(path)
    next(values for name, values in tensors.items() if name.endswith("/moment"))[0] = 1
    save_file(tensors, path)
    assert not left.judge().good


def test_a_theta_that_no_version_had_is_found(left: Left) -> None:
    left.tell({"event": "read", "version": 3, "theta": 1, "dtype": "float32"})
    assert left.judge().thetas_wrong == 1


def test_a_theta_of_a_version_that_was_never_reached_is_found(left: Left) -> None:
    left.tell({"event": "read", "version": 1000, "theta": 1, "dtype": "float32"})
    assert left.judge().thetas_wrong == 1


def test_a_shard_that_was_acknowledged_and_is_not_in_the_log_is_found(left: Left) -> None:
    left.tell({"event": "completed", "lease": left.last_answer()["lease"], "shard": 4})
    assert not left.judge().good
