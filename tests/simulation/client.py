"""A worker that acts like the SDK: one request at a time, sent again until a reply arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from gem_api.errors import GemError, LeaseEnded, Overloaded, TransportError
from gem_api.framing import parse_frame
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import BFLOAT16, FLOAT32, INT8, Encoder, Format
from numpy.typing import NDArray

SIZE = 5
SAMPLES, SHARD = 24, 8


@dataclass
class Request:
    """A worker's request to the server of a range. `operation` stays the same when it is sent again."""

    worker: str
    operation: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    index: int = 0


@dataclass
class Response:
    """The reply: a value or an error."""

    request: Request
    value: Any = None
    error: GemError | None = None


class Client:
    """One worker.

    Attributes:
        waiting: The request that is not answered yet.
        done: Whether the run is complete, as it was told.
    """

    def __init__(self, name: str, random: Random, overlap: bool) -> None:
        self.name = name
        self.overlap = overlap
        self.form: Format = random.choice([FLOAT32, FLOAT32, BFLOAT16, INT8])
        self.waiting: Request | None = None
        self.done = False
        self._encoder = self.form.encoder(SIZE)
        self._random = random
        self._operations = 0
        self._forget()

    def _forget(self) -> None:
        self.lease_id = ""
        self.sequence = 0
        self.version: int | None = None
        self._before = 0
        self._must_initialize = False
        self.shards: dict[int, int] = {}  # to the batches left

    def next_request(self) -> Request | None:
        """The request to send now: the one without a reply again, or a new one; None if the worker is done."""
        if self.waiting is None and not self.done:
            kind, fields = self._choose()
            self._operations += 1
            self.waiting = Request(self.name, self._operations, kind, fields)
        return self.waiting

    def answered(self, response: Response) -> None:
        request = response.request
        if self.waiting is None or request.operation != self.waiting.operation:
            return  # a late answer to what was sent twice
        if isinstance(response.error, TransportError | Overloaded):
            return
        self.waiting = None
        if isinstance(response.error, LeaseEnded):
            self._forget()
        elif response.error is None:
            getattr(self, f"_after_{request.kind}")(request.fields, response.value)
        elif request.kind == "initialize":
            self._must_initialize = False  # the first try did arrive
        else:
            raise AssertionError(f"{self.name}: {request.kind} {request.fields} is refused: {response.error!r}")

    # -- what to do next

    def _choose(self) -> tuple[str, dict[str, Any]]:
        if not self.lease_id:
            return "register", {"overlap": self.overlap}
        mine = {"lease": self.lease_id}
        if self._must_initialize:
            return "initialize", mine
        if self.version is None or self._random.random() < 0.05:
            return "pull", mine
        if not self.shards:
            return "shard", {**mine, "holding": ()}
        shard, batches = next(iter(self.shards.items()))
        if not batches:
            return "complete", {**mine, "shard": shard}
        return "commit", {**mine, **self._commit()}

    def _commit(self) -> dict[str, Any]:
        gradient: NDArray[np.float32] = np.array([self._random.gauss(0, 1) for _ in range(SIZE)], np.float32)
        base = self._random.choice([self.version, self._before]) if self.overlap else self.version
        payload = encoded(self._encoder, gradient)
        return {"sequence": self.sequence + 1, "base": base, "dtype": self.form.dtype, "payload": payload}

    # -- what became of it

    def _after_register(self, fields: dict[str, Any], value: Any) -> None:
        self.lease_id, self._must_initialize = value.lease_id, value.must_initialize

    def _after_initialize(self, fields: dict[str, Any], value: Any) -> None:
        self._must_initialize = False

    def _after_pull(self, fields: dict[str, Any], value: int | None) -> None:
        if value is not None:
            self._before = self.version = value
        else:
            self._must_initialize = True

    def _after_shard(self, fields: dict[str, Any], value: Any) -> None:
        if value is None:
            return
        self.done = value == "complete"
        if not self.done:
            self.shards[value.shard_id] = self._random.randint(0, 2)

    def _after_complete(self, fields: dict[str, Any], value: bool) -> None:
        self.shards.pop(fields["shard"], None)

    def _after_commit(self, fields: dict[str, Any], value: Any) -> None:
        self._encoder.applied()
        self.sequence = value.sequence
        self._before, self.version = self.version or 0, value.base_version
        shard = next(iter(self.shards))
        self.shards[shard] -= 1


def encoded(encoder: Encoder, gradient: NDArray[np.float32]) -> bytes:
    """A gradient in its wire format."""
    return b"".join(bytes(frame) for frame in _payloads(encoder.frames(gradient)))


def _payloads(frames: Any) -> Any:
    """The tensor bytes of the frames."""
    for frame in frames:
        chunk = parse_frame(frame, pb.CommitRequest).chunk
        assert chunk is not None
        yield chunk.data
