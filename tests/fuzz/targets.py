"""The fuzz targets. Each reads any bytes, or rejects them with an error that is meant for users.

frame     the frames of one call, and the buffer that is put together from them
segment   a file of the log, as it is
log       the log's records, with right checksums: what a replay makes of them
state     a checkpoint's state.json, with a right checksum
model     its model.safetensors, likewise
workers   its workers.safetensors, likewise

What is accepted must work: a run that was read back goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from fuzz.sample import LAYOUT, RUN, SAMPLES, SEED, commit, entries, new_core, write_run
from gem_api.errors import GemError
from gem_api.framing import Frame, chunk_frame, parse_frame
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import WIRE_FORMATS
from gem_server.core.shards import Shard
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery, segment
from gem_server.durability.checkpoint import BadCheckpoint
from gem_server.durability.segment import DamagedLog, Segment, to_text
from gem_server.durability.state import encoded
from gem_server.intake import messages
from gem_server.telemetry.progress import Progress
from gem_server.telemetry.run_view import RunView
from google.protobuf.message import DecodeError

NEXT_FRAME, NEXT_RECORD, PAYLOAD = b"\xfe--\xfe", b"\n--\n", b"\n\t"
STREAMED = (pb.CommitRequest, pb.InitializeCentralRequest, pb.PullResponse, pb.CommitResponse)
FORMATS = list(WIRE_FORMATS.values())
IN_MEMORY = "/dev/shm"
MODEL, WORKERS, STATE = "model.safetensors", "workers.safetensors", "state.json"


class Target(NamedTuple):
    """A fuzz target.

    Attributes:
        run: Takes any bytes; raises one of `refusals`, and nothing else.
        refusals: What users are meant to see.
        seeds: Bytes to start from, all of them right.
    """

    run: Callable[[bytes], None]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]

    def __call__(self, data: bytes) -> None:
        """Reads the bytes. Any exception that it raises is a bug."""
        with suppress(*self.refusals):
            self.run(data)


# -- frames


def run_frames(data: bytes) -> None:
    """Bytes 0 and 1 choose message and wire format; frames follow. Each must be decoded as protobuf decodes it."""
    if len(data) < 2:
        return
    message_type, form = STREAMED[data[0] % len(STREAMED)], FORMATS[data[1] % len(FORMATS)]
    assembly = form.assembly(np.zeros(LAYOUT.size, np.float32))
    for frame in data[2:].split(NEXT_FRAME):
        read = parse_frame(frame, message_type)
        require_meaning(read, frame, message_type)
        if read.chunk is not None:
            assembly.add(read.chunk)
    assembly.require_complete()


def require_meaning(read: Frame, frame: bytes, message_type: Any) -> None:
    try:
        message = message_type.FromString(frame)
    except DecodeError:
        raise AssertionError("a frame was read that protobuf refuses") from None
    header = message_type.DESCRIPTOR.fields_by_number[1].name
    assert (read.header is not None) == message.HasField(header)
    assert read.header is None or read.header.SerializeToString() == getattr(message, header).SerializeToString()
    assert (read.chunk is not None) == message.HasField("chunk")
    assert read.chunk is None or (read.chunk.offset, bytes(read.chunk.data)) == (message.chunk.offset, message.chunk.data)


def frame_seeds() -> list[bytes]:
    seeds = []
    for number, form in enumerate(FORMATS):
        body = bytes(form.nbytes(LAYOUT.size))
        head = pb.CommitHeader(lease_id="lease-1", sequence=1, layout_fingerprint=b"f" * 32, loss=0.5)
        opening = pb.CommitRequest(header=head).SerializeToString()
        block = form.packing.block
        chunks = [chunk_frame(at, memoryview(body)[at : at + block]) for at in range(0, len(body), block)]
        whole = chunk_frame(0, memoryview(body), opening)
        seeds += [bytes([0, number]) + NEXT_FRAME.join(frames) for frames in ([whole], [opening, *chunks])]
    return seeds


# -- the log


def run_segment(data: bytes) -> None:
    """The bytes are the log's first file."""
    with folder() as directory:
        path = directory / segment.name(1)
        path.write_bytes(data)
        for entry in Segment(path).entries():
            to_text(entry.record)


def segment_seeds() -> list[bytes]:
    return [contents(f"log/{segment.name(1)}").rstrip(b"\0")]


def run_log(data: bytes) -> None:
    """The log's records: the text of each, and the payload after `PAYLOAD` in it."""
    with folder() as directory:
        write_contents(directory)
        (directory / "log" / segment.name(1)).write_bytes(sealed_segment(data.split(NEXT_RECORD)))
        carry_on(directory)


def sealed_segment(records: list[bytes]) -> bytes:
    """A file of the log with these records."""
    head = segment._HEADER.pack(segment._MAGIC, 1, 1, SEED, RUN.encode(), b"0.1.0")
    head += segment._CRC.pack(crc32c(head))
    pieces: list[bytes | memoryview] = [head.ljust(segment._aligned(len(head)), b"\0")]
    for number, each in enumerate(records, 1):
        text, _, payload = each.partition(PAYLOAD)
        pieces += segment.encode(number, text, [payload], number - 1, SEED)
    return b"".join(pieces)


def log_seeds() -> list[bytes]:
    with folder() as directory:
        write_contents(directory)
        records = [(entry.record, bytes(entry.record.payload[0])) for entry in entries(directory)]
    texts = [to_text(record) + (PAYLOAD + payload if payload else b"") for record, payload in records]
    return [NEXT_RECORD.join(texts), *(NEXT_RECORD.join(texts[:count]) for count in (1, 3))]


# -- checkpoints


def run_state(data: bytes) -> None:
    """The bytes are state.json; its checksums are corrected first."""
    with folder() as directory:
        path = write_contents(directory)
        (path / STATE).write_bytes(sealed_state(data))
        carry_on(directory)


def sealed_state(data: bytes) -> bytes:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(state, dict):
        return data
    files = {name: summed(contents(f"{checkpoint_name()}/{name}")) for name in (MODEL, WORKERS)}
    return sum_state({**state, "files": files})


def sum_state(state: dict[str, Any]) -> bytes:
    state = {key: value for key, value in state.items() if key != "sha256"}
    return json.dumps({**state, "sha256": hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()}).encode()


def summed(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def state_seeds() -> list[bytes]:
    state = json.loads(contents(f"{checkpoint_name()}/{STATE}"))
    for name in ("files", "sha256"):
        del state[name]
    for lease in state["leases"]:  # the histogram alone is longer than all the rest
        lease["answer"]["pi"].update(counts=[16, 0, 1], edges=[0.0, 1.0, 5.0])
    return [json.dumps(state, separators=(",", ":")).encode()]


def run_tensors(name: str, data: bytes) -> None:
    """The bytes are one of the checkpoint's tensor files; state.json gets their checksum."""
    with folder() as directory:
        path = write_contents(directory)
        (path / name).write_bytes(data)
        state = json.loads(contents(f"{checkpoint_name()}/{STATE}"))
        state["files"][name] = summed(data)
        (path / STATE).write_bytes(sum_state(state))
        carry_on(directory)


def tensor_seeds(name: str) -> list[bytes]:
    return [contents(f"{checkpoint_name()}/{name}")]


def carry_on(directory: Path) -> None:
    """Recovers the run, and continues it as a server and its workers would. An expected error ends it."""
    refused: list[str] = []
    try:
        recovered = recovery.recover(directory, new_core, 0.0, lambda path, why: refused.append(why), logged=True)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{error} ({'; '.join(refused)})") from error
    assert recovered is not None, "a checkpoint was overlooked"
    core = recovered.core
    RunView(core, Progress(started=0.0), lambda: 0.0).read().SerializeToString()
    layout = core.central.layout
    assert layout is not None
    json.dumps(vars(checkpoint.capture(core).state), default=encoded)
    registration = core.register("honest", layout, 0.0)
    messages.registration(registration, core).SerializeToString()
    core.pull(core.leases.get(registration.lease_id))
    if layout == LAYOUT:
        commit(core, registration.lease_id, "float32")
    ask_for_shards(core, registration.lease_id)


def ask_for_shards(core: Core, lease_id: str) -> None:
    shard = core.lease_shard(lease_id, core.ledger.samples or SAMPLES, 0.0)
    if isinstance(shard, Shard):
        messages.shard_response(shard, core.ledger.indices(shard))


# -- the run that they all begin with


class folder:  # noqa: N801 used as a function
    """A folder that exists during a `with` block."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None))
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)


@cache
def sample_files() -> dict[str, bytes]:
    """The run's files, by their paths in its folder."""
    with folder() as directory:
        write_run(directory)
        return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def contents(name: str) -> bytes:
    return sample_files()[name]


def checkpoint_name() -> str:
    return next(name.partition("/")[0] for name in sample_files() if name.startswith("checkpoint-"))


def write_contents(directory: Path) -> Path:
    """Writes the run; returns its checkpoint's folder."""
    for name, data in sample_files().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory / checkpoint_name()


_RUN_ERRORS = (BadCheckpoint, DamagedLog, GemError)
TARGETS = {
    "frame": Target(run_frames, (GemError,), frame_seeds),
    "segment": Target(run_segment, (DamagedLog,), segment_seeds),
    "log": Target(run_log, _RUN_ERRORS, log_seeds),
    "state": Target(run_state, _RUN_ERRORS, state_seeds),
    "model": Target(lambda data: run_tensors(MODEL, data), _RUN_ERRORS, lambda: tensor_seeds(MODEL)),
    "workers": Target(lambda data: run_tensors(WORKERS, data), _RUN_ERRORS, lambda: tensor_seeds(WORKERS)),
}
