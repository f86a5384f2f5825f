"""Writes the hostile files: `python -m hostile_files.make` in tests/. Each is named after what is wrong with it.

The folders are named after the targets of fuzz/targets.py, which say what a file there is taken for. All begin with a file that
is right, and differ in one thing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c
from fuzz.targets import MODEL, NEXT_RECORD, PAYLOAD, TARGETS, checkpoint_name, contents, sealed_segment
from gem_server.durability import segment
from gem_server.durability.checkpoint import BadCheckpoint
from gem_server.durability.segment import DamagedLog, ForeignLog

FOLDER = Path(__file__).parent
HUGE = 2**64 - 1
MANY_DIGITS = 10**400  # an integer that no float can hold


class Hostile(NamedTuple):
    """A file, and the error that it must cause: its type, and part of its text."""

    content: bytes
    error: type[Exception]
    says: str


# -- the log's files


def right(name: str) -> bytes:
    return TARGETS[name].seeds()[0]


def records() -> list[bytes]:
    return right("log").split(NEXT_RECORD)


def header(magic: bytes = b"GEMLOG2\n", serial: int = 1, first: int = 1, run: bytes = b"0a1b2c3d") -> bytes:
    """A segment's header, with a valid checksum."""
    head = segment._HEADER.pack(magic, serial, first, 7, run, b"9.8.7")
    return (head + segment._CRC.pack(crc32c(head))).ljust(segment._aligned(segment._HEADER_BYTES), b"\0")


def with_header(**changes: Any) -> bytes:
    return header(**changes) + right("segment")[len(header()) :]


def with_fields(place: int, **changes: int) -> bytes:
    """The log's file with other fields before record `place`, and a valid checksum for them."""
    out, at = bytearray(right("segment")), record_at(place)
    names = ("number", "durable", "text", "payload", "check")
    begin = at + segment._PREFIX
    fields = dict(zip(names, segment._RECORD.unpack_from(out, begin), strict=True)) | changes
    segment._RECORD.pack_into(out, begin, *fields.values())
    segment._CRC.pack_into(out, at + 4, crc32c(bytes(out[begin : begin + segment._RECORD.size]), 7))
    return bytes(out)


def record_at(place: int) -> int:
    """The byte at which a record of the log's file begins; records are counted from 0."""
    at = -1
    for _ in range(place + 1):
        at = right("segment").index(b"GEMr", at + 1)
    return at


def flipped(at: int) -> bytes:
    out = bytearray(right("segment"))
    out[at] ^= 1
    return bytes(out)


def sealed(*texts: bytes) -> bytes:
    return sealed_segment(list(texts))


SEGMENTS: dict[str, Callable[[], Hostile]] = {
    "empty": lambda: Hostile(b"", DamagedLog, "not a log segment"),
    "all-zeros": lambda: Hostile(bytes(4096), DamagedLog, "not a log segment"),
    "header-of-another-version": lambda: Hostile(with_header(magic=b"GEMLOG3\n"), ForeignLog, "release 9.8.7, which"),
    "header-of-another-segment": lambda: Hostile(with_header(serial=2), DamagedLog, "segment 2"),
    "header-with-the-largest-numbers": lambda: Hostile(with_header(serial=HUGE, first=HUGE), DamagedLog, "segment 1844"),
    "header-with-a-flipped-bit": lambda: Hostile(flipped(20), DamagedLog, "header is damaged"),
    "header-truncated": lambda: Hostile(right("segment")[:30], DamagedLog, "not a log segment"),
    "segment-with-a-text-beyond-the-file": lambda: Hostile(with_fields(1, text=2**32 - 1), DamagedLog, "record 2"),
    "segment-with-a-payload-beyond-the-file": lambda: Hostile(with_fields(1, payload=HUGE), DamagedLog, "record 2"),
    "record-with-a-flipped-bit-in-its-payload": lambda: Hostile(flipped(record_at(2) - 20), DamagedLog, "record 2"),
    "record-with-another-number": lambda: Hostile(with_fields(1, number=9), DamagedLog, "record 2"),
    "records-in-another-files-seed": lambda: Hostile(
        header() + right("segment")[len(header()) : record_at(1)] + b"GEMr" * 9
        + right("segment")[record_at(2) :], DamagedLog, "hole"),
    "record-missing": lambda: Hostile(
        right("segment")[: record_at(1)] + right("segment")[record_at(2) :], DamagedLog, "record 2"),
    "record-with-a-text-that-is-no-json": lambda: Hostile(sealed(b"{"), ForeignLog, "does not understand"),
    "record-with-a-text-that-is-no-utf-8": lambda: Hostile(sealed(b'["\xff",{}]'), ForeignLog, "does not understand"),
    "record-with-a-text-nested-too-deeply": lambda: Hostile(sealed(b"[" * 20_000), DamagedLog, "too deeply"),
    "record-with-fields-that-are-a-list": lambda: Hostile(sealed(b'["ended",[]]'), DamagedLog, "ended"),
    "record-of-an-unknown-kind": lambda: Hostile(sealed(b'["stolen",{}]'), DamagedLog, "stolen"),
    "record-of-a-kind-that-is-a-list": lambda: Hostile(sealed(b"[[],{}]"), ForeignLog, "does not understand"),
    "record-with-a-number-of-5000-digits": lambda: Hostile(
        sealed(b'["pulled",{"lease":"x","version":' + b"1" * 5000 + b"}]"), ForeignLog, "does not understand"),
}  # fmt: skip


# -- the log's records


def with_field(place: int, name: str, value: Any, payload: bytes | None = None) -> bytes:
    """The log's records, with another field in one of them."""
    texts = records()
    text, _, old = texts[place].partition(PAYLOAD)
    kind, fields = json.loads(text)
    texts[place] = json.dumps([kind, {**fields, name: value}]).encode() + PAYLOAD + (old if payload is None else payload)
    return NEXT_RECORD.join(texts)


def without_record(place: int) -> bytes:
    texts = records()
    del texts[place]
    return NEXT_RECORD.join(texts)


def start(says: str, **changes: Any) -> Hostile:
    """The log's records after a start of the server with these hyper-parameters; None leaves one out."""
    values = changed(json.loads(right("state"))["hyperparameters"], changes)
    return Hostile(NEXT_RECORD.join([json.dumps(["began", values]).encode(), *records()]), DamagedLog, says)


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (values | changes).items() if value is not None}


PULLED, COMMITTED, DEALT, ENDED = 0, 1, 3, 5
LOGS: dict[str, Callable[[], Hostile]] = {
    "commit-of-a-lease-that-does-not-exist": lambda: Hostile(
        with_field(COMMITTED, "lease", "stranger"), DamagedLog, "no such lease"),
    "commit-with-a-negative-base-version": lambda: Hostile(
        with_field(COMMITTED, "base_version", -1), DamagedLog, "base_version"),
    "commit-with-a-base-version-of-the-future": lambda: Hostile(
        with_field(COMMITTED, "base_version", 10**15), DamagedLog, "does not exist"),
    "commit-with-a-version-that-is-not-due": lambda: Hostile(with_field(COMMITTED, "version", 9), DamagedLog, "version 3"),
    "commit-with-a-ticket-that-is-a-text": lambda: Hostile(with_field(COMMITTED, "ticket", "1"), DamagedLog, "ticket"),
    "commit-with-a-sequence-beyond-64-bits": lambda: Hostile(with_field(COMMITTED, "sequence", 2**64), DamagedLog, "sequence"),
    "commit-with-an-unknown-wire-format": lambda: Hostile(with_field(COMMITTED, "dtype", 99), DamagedLog, "wire dtype 99"),
    "commit-with-a-gradient-too-short": lambda: Hostile(
        with_field(COMMITTED, "samples", 4, payload=bytes(64)), DamagedLog, "64 of 68"),
    "commit-with-a-gradient-too-long": lambda: Hostile(
        with_field(COMMITTED, "samples", 4, payload=bytes(72)), DamagedLog, "68 bytes"),
    "commit-lost": lambda: Hostile(without_record(COMMITTED), DamagedLog, "version"),
    "pull-of-a-version-that-is-not-there": lambda: Hostile(with_field(PULLED, "version", 7), DamagedLog, "version 2"),
    "shard-of-a-negative-number-of-samples": lambda: Hostile(with_field(DEALT, "samples", -40), DamagedLog, "samples"),
    "shard-of-another-number-of-samples": lambda: Hostile(with_field(DEALT, "samples", 41), DamagedLog, "41 samples"),
    "shards-held-that-are-texts": lambda: Hostile(with_field(DEALT, "holding", ["2"]), DamagedLog, "holding"),
    "commit-with-a-loss-of-401-digits": lambda: Hostile(
        with_field(COMMITTED, "loss", MANY_DIGITS), DamagedLog, "loss must be a number"),
    "commit-with-a-norm-of-401-digits": lambda: Hostile(
        with_field(COMMITTED, "norm", MANY_DIGITS), DamagedLog, "norm must be a number"),
    "start-without-a-learning-rate": lambda: start("no 'learning_rate'", learning_rate=None),
    "start-with-an-unknown-hyperparameter": lambda: start("'warp'", warp=9),
    "start-with-a-learning-rate-of-401-digits": lambda: start("--learning-rate must be", learning_rate=MANY_DIGITS),
    "start-with-a-momentum-that-is-a-text": lambda: start("--rule …:momentum must be", momentum="0.9"),
    "start-with-shards-of-no-samples": lambda: start("shard_size must be", shard_size=0),
    "start-with-another-batch-size": lambda: start("can't change its batch_size", batch_size=2),
    "start-with-hyperparameters-that-are-a-list": lambda: Hostile(
        NEXT_RECORD.join([b'["began",[]]', *records()]), DamagedLog, "began must be an object"),
    "end-for-an-unknown-reason": lambda: Hostile(with_field(ENDED, "reason", "bored"), DamagedLog, "bored"),
}  # fmt: skip


# -- a checkpoint's state


def with_state(change: Callable[[dict[str, Any]], object]) -> bytes:
    state = json.loads(right("state"))
    change(state)
    return json.dumps(state, separators=(",", ":")).encode()


def state(says: str, **changes: Any) -> Hostile:
    return Hostile(with_state(lambda state: state.update(changes)), BadCheckpoint, says)


def part(says: str, name: str, **changes: Any) -> Hostile:
    return Hostile(with_state(lambda state: state[name].update(changes)), BadCheckpoint, says)


def lease(says: str, **changes: Any) -> Hostile:
    return Hostile(with_state(lambda state: state["leases"][0].update(changes)), BadCheckpoint, says)


def hyperparameters(says: str, **changes: Any) -> Hostile:
    """A state with other hyper-parameters; None leaves one out."""
    values = changed(json.loads(right("state"))["hyperparameters"], changes)
    return state(says, hyperparameters=values)


def answer(says: str, **changes: Any) -> Hostile:
    return Hostile(with_state(lambda state: state["leases"][0]["answer"].update(changes)), BadCheckpoint, says)


def rename_lease(state: dict[str, Any]) -> None:
    state["leases"][0]["lease_id"], state["ledger"]["held"] = "stranger", []


STATES: dict[str, Callable[[], Hostile]] = {
    "state-with-a-negative-version": lambda: state("state.version", version=-1),
    "state-with-a-version-beyond-64-bits": lambda: state("state.version", version=2**64),
    "state-with-a-version-that-is-a-text": lambda: state("state.version", version="2"),
    "state-with-a-version-that-is-true": lambda: state("state.version", version=True),
    "state-with-a-huge-layout": lambda: state("too small", layout=[["w", [2**40]]]),
    "state-with-a-layout-larger-than-its-file": lambda: state("too small", layout=[["w", [1000]]]),
    "state-with-a-layout-of-infinite-extent": lambda: state("layout", layout=[["w", [float("inf")]]]),
    "state-with-an-empty-layout": lambda: state("no tensors", layout=[]),
    "state-with-another-shape-of-as-many-elements": lambda: state("shape", layout=[["w", [5, 3]], ["b", [2]]]),
    "state-with-groups-of-a-tensor-that-is-not-there": lambda: state("parameter groups name", groups={"x": [0.5, True]}),
    "state-with-a-group-whose-rate-is-nan": lambda: state("learning-rate factor", groups={"w": [float("nan"), True]}),
    "state-with-a-group-of-one-number": lambda: state("state.groups.w must", groups={"w": [0.5]}),
    "state-with-a-group-that-decays-by-a-number": lambda: state("state.groups.w[1] must", groups={"w": [0.5, 1]}),
    "state-with-options-that-its-optimizer-has-not": lambda: hyperparameters("no setting", optimizer_options="beta9=1"),
    "state-with-a-log-that-is-a-text": lambda: state("state.log", log="11"),
    "state-without-a-rule": lambda: hyperparameters("no 'rule'", rule=None),
    "state-without-a-learning-rate": lambda: hyperparameters("no 'learning_rate'", learning_rate=None),
    "state-with-an-unknown-hyperparameter": lambda: hyperparameters("'warp'", warp=9),
    "state-with-hyperparameters-that-are-a-list": lambda: state("hyperparameters must be an object", hyperparameters=[]),
    "state-with-an-unknown-rule": lambda: hyperparameters("no rule", rule="sgd"),
    "state-with-a-rule-that-is-a-number": lambda: hyperparameters("--rule must be of type str", rule=3),
    "state-with-rule-options-that-are-no-utf-8": lambda: hyperparameters("--rule", rule_options="proxy=\udcff"),
    "state-with-a-warm-up-factor-that-is-a-text": lambda: hyperparameters("…:warmup_factor must be", warmup_factor="0.1"),
    "state-with-a-learning-rate-that-is-nan": lambda: hyperparameters("--learning-rate", learning_rate=float("nan")),
    "state-with-a-learning-rate-of-401-digits": lambda: hyperparameters("--learning-rate must", learning_rate=MANY_DIGITS),
    "state-with-shards-of-no-samples": lambda: hyperparameters("shard_size must be", shard_size=0),
    "state-with-a-number-of-steps-that-is-true": lambda: hyperparameters("--steps must be", steps=True),
    "state-with-a-norm-of-401-digits": lambda: state("state.norms[0] must be a number", norms=[MANY_DIGITS]),
    "state-with-a-shared-number-of-401-digits": lambda: state("state.shared.a must be", shared={"a": MANY_DIGITS}),
    "state-with-an-answer-whose-loss-has-401-digits": lambda: answer("answer.loss must be a number", loss=MANY_DIGITS),
    "state-with-an-answer-without-a-ticket": lambda: Hostile(
        with_state(lambda state: state["leases"][0]["answer"].pop("ticket")), BadCheckpoint, "answer has no 'ticket'"),
    "state-with-a-negative-sample-count": lambda: part("ledger.samples", "ledger", samples=-1),
    "state-with-a-shard-beyond-its-samples": lambda: part(
        "a shard", "ledger", held=[["lease-1", 1, "ann", 0, 2**63, HUGE]]),
    "state-with-an-empty-shard": lambda: part("a shard", "ledger", held=[["lease-1", 1, "ann", 0, 8, 8]]),
    "state-with-a-returned-shard-that-is-empty": lambda: part("a shard", "ledger", decks=[["ann", 0, 8, [[1, 8, 8]]]]),
    "state-with-more-samples-dealt-than-there-are": lambda: part("dealt more", "ledger", decks=[["ann", 0, 41, []]]),
    "state-with-a-shard-of-a-stranger": lambda: part("stranger", "ledger", held=[["stranger", 1, "ann", 0, 0, 8]]),
    "state-with-an-outcome-that-does-not-exist": lambda: state("lucky", outcomes={"lucky": 1}),
    "lease-with-a-sequence-that-is-null": lambda: lease("sequence", sequence=None),
    "lease-with-a-rate-that-is-nan": lambda: lease("learning-rate", eta=[float("nan"), 1.0]),
    "lease-with-a-factor-above-1": lambda: lease("factor", eta=[0.1, 1.5]),
    "lease-whose-buffers-are-missing": lambda: Hostile(with_state(rename_lease), BadCheckpoint, "stranger/"),
    "lease-with-an-answer-that-is-a-list": lambda: lease("answer", answer=[]),
    "state-nested-too-deeply": lambda: Hostile(b"[" * 20_000, BadCheckpoint, "RecursionError"),
    "state-that-is-a-number": lambda: Hostile(b"1", BadCheckpoint, "state.json"),
}  # fmt: skip


# -- a checkpoint's tensors


def tensors(header: dict[str, Any] | bytes, data: bytes = bytes(68)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


W, B = tensor(0, 60, [3, 5]), tensor(60, 68, [2])
MODELS: dict[str, Callable[[], Hostile]] = {
    "safetensors-with-overlapping-offsets": lambda: Hostile(
        tensors({"w": W, "b": tensor(52, 60, [2])}, bytes(60)), BadCheckpoint, "offset"),
    "safetensors-with-a-hole": lambda: Hostile(tensors({"w": W, "b": tensor(64, 72, [2])}, bytes(72)), BadCheckpoint, "b"),
    "safetensors-with-offsets-beyond-the-file": lambda: Hostile(
        tensors({"w": W, "b": tensor(60, HUGE, [2])}), BadCheckpoint, "Safetensor"),
    "safetensors-with-a-shape-that-overflows": lambda: Hostile(
        tensors({"w": tensor(0, 60, [2**63, 2**63]), "b": B}), BadCheckpoint, "Safetensor"),
    "safetensors-with-a-header-beyond-the-file": lambda: Hostile(struct.pack("<Q", HUGE) + b"{}", BadCheckpoint, "too small"),
    "safetensors-with-a-header-that-is-no-json": lambda: Hostile(tensors(b"{{{{"), BadCheckpoint, "Safetensor"),
    "safetensors-of-doubles": lambda: Hostile(
        tensors({"w": tensor(0, 120, [3, 5], "F64"), "b": tensor(120, 136, [2], "F64")}, bytes(136)), BadCheckpoint, "float64"),
    "safetensors-of-bfloat16": lambda: Hostile(
        tensors({"w": tensor(0, 30, [3, 5], "BF16"), "b": tensor(30, 34, [2], "BF16"), "c": tensor(34, 134, [25])}, bytes(134)),
        BadCheckpoint, "bfloat16"),
    "safetensors-without-a-tensor": lambda: Hostile(tensors({"w": W, "c": B}), BadCheckpoint, "b"),
    "safetensors-with-one-number-for-all": lambda: Hostile(
        tensors({"w": tensor(0, 4, [1]), "b": tensor(4, 12, [2]), "more": tensor(12, 68, [14])}), BadCheckpoint, "shape (1,)"),
    "safetensors-truncated": lambda: Hostile(contents(f"{checkpoint_name()}/{MODEL}")[:-1], BadCheckpoint, "not fully covered"),
    "empty": lambda: Hostile(b"", BadCheckpoint, "too small"),
}  # fmt: skip

FILES = {"segment": SEGMENTS, "log": LOGS, "state": STATES, "model": MODELS}
CASES = {f"{folder}/{name}": make for folder, cases in FILES.items() for name, make in cases.items()}


def main() -> None:
    for name, make in CASES.items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_bytes(make().content)


if __name__ == "__main__":
    main()
