"""A worker of the chaos run: commits random gradients until stopped, and records everything that the servers reply.

Its diary has a line of JSON for each thing, in the order in which it happened, each written by one system call. Each server
holds a range of θ (range 0 is all of it if there is one server) and gets a part of each commit:

    sending    a commit begins: lease, sequence, parts (CRC-32 of each range's part of the gradient, float32; null if rounded)
    try        a part of it is sent: range, lease, sequence, base (version), share (of a whole batch; 0: none is named),
               gradient (CRC-32 as above)
    ack        it is applied, says that server: range, lease, sequence, version, staleness; base, theta, dtype of the part of θ
               that came; via
    committed  all servers have said so: lease, sequence, batches (shard and number of samples of each that it covers)
    read       a pull: range, lease, version, theta (CRC-32 of its float32 bytes), dtype (that it was sent in)
    completed  a shard is done, says the server that leads: lease, shard
    closed     the session has ended in order
    trouble    what the SDK logged while it tried again: what
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import gem_client
import numpy as np
from gem_client.run.link import Link
from gem_client.run.pending_commit import PendingCommit
from gem_client.transport import connection

SAMPLES = 6400
_UNIT = 4096  # elements


@dataclass(frozen=True)
class Kind:
    """A worker's settings for its connection to the server, and how many seconds a whole batch takes it. `lane`: whether it can
    reach the lane's port; else its commits go over gRPC."""

    shared_memory: bool = False
    proxied: bool = True
    lane: bool = True
    overlap: bool = False
    shards: bool = False
    gradient_dtype: str = "float32"
    theta_dtype: str = "float32"
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Orders:
    """The settings of a worker process: JSON in its only argument."""

    address: str
    name: str
    diary: str
    stop: str
    parameters: int
    seed: int
    kind: Kind

    def text(self) -> str:
        return json.dumps(asdict(self))


def orders(text: str) -> Orders:
    fields = json.loads(text)
    return Orders(**{**fields, "kind": Kind(**fields["kind"])})


class Diary(logging.Handler):
    """An append-only file. Lines that were written outlive the process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **entry: Any) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.note(event="trouble", what=record.getMessage())


def bounds(parameters: int, index: int, count: int) -> tuple[int, int]:
    """The elements [begin, end) of range `index` of `count`: ⌊P·i/N⌋, rounded down to a multiple of 4096; the last ends at P.

    This is the contract's formula, written a second time, so that the check does not depend on the first."""
    begin, end = (parameters * edge // count // _UNIT * _UNIT for edge in (index, index + 1))
    return begin, parameters if index + 1 == count else end


def cut(packed: Any, count: int) -> list[Any]:
    """The parts of a packed buffer (shape (P,)), as views, in the order of the ranges."""
    return [packed[slice(*bounds(packed.size, index, count))] for index in range(count)]


def observe(session: gem_client.Session, diary: Diary, kind: Kind) -> None:
    """Makes the session record every attempt and every reply: below the SDK's retries, above the network."""
    _observe_parts(session, diary, kind)
    _observe_commits(session, diary, kind)


def _observe_parts(session: gem_client.Session, diary: Diary, kind: Kind) -> None:
    """Records what goes to each server, and what it replies."""
    member, attempt = session._member, Link.attempt
    pull = member.pull

    def try_part(link: Link, header: Any, update: Any, theta: Any) -> Any:
        if link.caller is not session._caller:  # another session in this process
            return attempt(link, header, update, theta)
        part = {"range": link.part.index, "lease": header.lease_id, "sequence": header.sequence}
        sent = {"base": header.base_version, "share": header.batch_share, "gradient": _crc(update, kind)}
        diary.note(event="try", **part, **sent)
        result = attempt(link, header, update, theta)
        facts = {"version": result.version, "staleness": result.staleness, "base": result.base_version}
        dtype = "float32" if link.region is not None else kind.theta_dtype
        diary.note(event="ack", via=link.connection.transport, **part, **facts, theta=zlib.crc32(theta.tobytes()), dtype=dtype)
        return result

    def read_part(link: Link) -> bool:
        must_initialize = pull(link)
        if not must_initialize:
            seen = {
                "lease": member.registration.lease_id,
                "version": link.version,
                "theta": zlib.crc32(link.view(member.theta).tobytes()),
            }
            diary.note(event="read", range=link.part.index, **seen, dtype=kind.theta_dtype)
        return must_initialize

    Link.attempt, member.pull = try_part, read_part  # type: ignore[method-assign, assignment]


def _observe_commits(session: gem_client.Session, diary: Diary, kind: Kind) -> None:
    """Records what the session sends and what it tells its caller."""
    member, connection = session._member, session._member.links.leader.connection
    send, complete = member.commit, connection.complete_shard

    def send_whole(commit: PendingCommit) -> Any:
        facts = {"lease": member.registration.lease_id, "sequence": member.sequence + 1}
        parts = cut(commit.update, len(list(member.links)))
        diary.note(event="sending", **facts, parts=[_crc(part, kind) for part in parts])
        result = send(commit)
        if result is not None:
            batches = [[batch.shard.shard_id, batch.samples] for batch in commit.batches]
            diary.note(event="committed", **facts, batches=batches)
        return result

    def complete_shard(lease_id: str, shard_id: int) -> bool:
        accepted = complete(lease_id, shard_id)
        if accepted:
            diary.note(event="completed", lease=lease_id, shard=shard_id)
        return accepted

    member.commit = send_whole  # type: ignore[method-assign]
    connection.complete_shard = complete_shard  # type: ignore[method-assign]


def _crc(gradient: Any, kind: Kind) -> int | None:
    return zlib.crc32(gradient) if kind.gradient_dtype != "int8" else None


class Gradients:
    """Random gradients that bfloat16 represents exactly. One of a whole batch takes `step_seconds` at least."""

    def __init__(self, parameters: int, seed: int, step_seconds: float = 0.0) -> None:
        self._parameters = parameters
        self._random = np.random.default_rng(seed)
        self._step_seconds = step_seconds

    def __call__(self, share: float = 1.0) -> Any:
        time.sleep(self._step_seconds * share)
        gradient = self._random.standard_normal(self._parameters, np.float32)
        bits = gradient.view(np.uint32)
        bits &= np.uint32(0xFFFF0000)
        return gradient


def first_value(parameters: int) -> Any:
    """The first value of θ, the same from every worker."""
    return np.random.default_rng(0).standard_normal(parameters, np.float32)


def commit_one_by_one(session: gem_client.Session, gradients: Gradients, stop: Path) -> None:
    while not stop.exists():
        share = session.batch_share
        session.commit(gradients(share), loss=1.0, samples=1, share=share)


def commit_shards(session: gem_client.Session, gradients: Gradients, stop: Path) -> None:
    for _ in session.shards(SAMPLES):
        if stop.exists():
            return
        session.commit(gradients(session.batch_share), loss=1.0)


def commit_overlapping(session: gem_client.Session, gradients: Gradients, stop: Path) -> None:
    """Commits with overlap: each gradient is computed on the last θ received while the commit before it is under way."""
    gradient, share, base = gradients(), 1.0, session.base
    while not stop.exists():
        at_hand, due = session.base, session.batch_share
        session.begin_commit(gradient, loss=1.0, samples=1, base=base, share=share)
        following = gradients(due)
        session.finish_commit()
        gradient, share, base = following, due, at_hand


def _refused(*_: object) -> NoReturn:
    raise ConnectionRefusedError("no way to the port")


def main() -> None:
    told = orders(sys.argv[1])
    diary, kind = Diary(Path(told.diary)), told.kind
    logging.getLogger("gem_client").addHandler(diary)
    if not kind.lane:
        connection.open_network_lane = _refused  # type: ignore[attr-defined, assignment]
    retry = gem_client.Retry(give_up_after=120, first_pause=0.05, longest_pause=0.5)
    formats = {"gradient_dtype": kind.gradient_dtype, "theta_dtype": kind.theta_dtype}
    with gem_client.connect(
        told.address, name=told.name, retry=retry, timeout=5, shared_memory=kind.shared_memory, **formats
    ) as session:
        observe(session, diary, kind)
        session.join({"weight": first_value(told.parameters)}, overlap=kind.overlap)
        work = commit_overlapping if kind.overlap else commit_shards if kind.shards else commit_one_by_one
        work(session, Gradients(told.parameters, told.seed, kind.step_seconds), Path(told.stop))
    diary.note(event="closed")


if __name__ == "__main__":
    main()
