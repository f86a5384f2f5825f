"""A worker of the chaos run: commits random gradients until stopped, and records everything that the server replies.

Its diary has a line of JSON for each thing, in the order in which it happened, each written by one system call:

    try        a commit is sent: lease, sequence, base (version), gradient (CRC-32 of its float32 bytes; null where rounded)
    ack        it is applied, says the server: lease, sequence, version, staleness; base, theta, dtype of the θ that came
    read       a pull: version, theta (CRC-32 of its float32 bytes), dtype (that it was sent in)
    completed  a shard is done, says the server: lease, shard
    trouble    what the SDK logged while it tried again: what
"""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gem_client
import numpy as np

SAMPLES = 6400


@dataclass(frozen=True)
class Kind:
    """A worker's settings for its connection to the server."""

    shared_memory: bool = False
    proxied: bool = True
    overlap: bool = False
    shards: bool = False
    gradient_dtype: str = "float32"
    theta_dtype: str = "float32"


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


def observe(session: gem_client.Session, diary: Diary, kind: Kind) -> None:
    """Makes the session record every attempt and every reply: below the SDK's retries, above the network."""
    sender, member, connection = session._sender, session._member, session._connection
    attempt, pull, complete = sender._try, member.pull, connection.complete_shard

    def try_commit(link: Any, header: Any, packed: Any) -> Any:
        gradient = zlib.crc32(packed) if kind.gradient_dtype != "int8" else None
        commit = {"lease": header.lease_id, "sequence": header.sequence}
        diary.note(event="try", **commit, base=header.base_version, gradient=gradient)
        result = attempt(link, header, packed)
        facts = {"version": result.version, "staleness": result.staleness, "base": result.base_version}
        dtype = "float32" if session.shares_memory else kind.theta_dtype
        diary.note(event="ack", via=session.transport, **commit, **facts, theta=zlib.crc32(member.theta.tobytes()), dtype=dtype)
        return result

    def read(link: Any) -> bool:
        must_initialize = pull(link)
        if not must_initialize:
            diary.note(event="read", version=member.version, theta=zlib.crc32(member.theta.tobytes()), dtype=kind.theta_dtype)
        return must_initialize

    def complete_shard(lease_id: str, shard_id: int) -> bool:
        accepted = complete(lease_id, shard_id)
        if accepted:
            diary.note(event="completed", lease=lease_id, shard=shard_id)
        return accepted

    sender._try, member.pull, connection.complete_shard = try_commit, read, complete_shard  # type: ignore[method-assign]


class Gradients:
    """Random gradients that bfloat16 represents exactly."""

    def __init__(self, parameters: int, seed: int) -> None:
        self._parameters = parameters
        self._random = np.random.default_rng(seed)

    def __call__(self) -> Any:
        gradient = self._random.standard_normal(self._parameters, np.float32)
        bits = gradient.view(np.uint32)
        bits &= np.uint32(0xFFFF0000)
        return gradient


def first_value(parameters: int) -> Any:
    """The first value of θ, the same from every worker."""
    return np.random.default_rng(0).standard_normal(parameters, np.float32)


def commit_one_by_one(session: gem_client.Session, gradients: Gradients, stop: Path) -> None:
    while not stop.exists():
        session.commit(gradients(), loss=1.0, samples=1)


def commit_shards(session: gem_client.Session, gradients: Gradients, stop: Path) -> None:
    for _ in session.shards(SAMPLES):
        if stop.exists():
            return
        session.commit(gradients(), loss=1.0)


def commit_overlapping(session: gem_client.Session, gradients: Gradients, stop: Path) -> None:
    """Commits with overlap: each gradient is computed on the last θ received while the commit before it is under way."""
    gradient, base = gradients(), session.base
    while not stop.exists():
        at_hand = session.base
        session.begin_commit(gradient, loss=1.0, samples=1, base=base)
        following = gradients()
        session.finish_commit()
        gradient, base = following, at_hand


def main() -> None:
    told = orders(sys.argv[1])
    diary, kind = Diary(Path(told.diary)), told.kind
    logging.getLogger("gem_client").addHandler(diary)
    retry = gem_client.Retry(give_up_after=120, first_pause=0.05, longest_pause=0.5)
    formats = {"gradient_dtype": kind.gradient_dtype, "theta_dtype": kind.theta_dtype}
    with gem_client.connect(
        told.address, name=told.name, retry=retry, timeout=5, shared_memory=kind.shared_memory, **formats
    ) as session:
        observe(session, diary, kind)
        session.join({"weight": first_value(told.parameters)}, overlap=kind.overlap)
        work = commit_overlapping if kind.overlap else commit_shards if kind.shards else commit_one_by_one
        work(session, Gradients(told.parameters, told.seed), Path(told.stop))


if __name__ == "__main__":
    main()
