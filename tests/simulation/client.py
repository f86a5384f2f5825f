"""A worker that acts like the SDK: one lease id and one sequence on all servers, each commit to all of them, and each request
sent again until its response arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from gem_api.errors import GemError, InvalidRequest, LeaseEnded, Overloaded, RejectedCommit, SequenceGap, TransportError
from gem_api.framing import parse_frame
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import BFLOAT16, FLOAT32, INT8, Encoder, Format
from gem_server.core.values import LeaderRegistration
from numpy.typing import NDArray
from simulation.everywhere import Everywhere
from simulation.truth import Known

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

    Args:
        name: Its name.
        random: Decides everything.
        overlap: Whether it computes its next gradient while a commit is under way.
        parts: What each range holds of the model.
        truth: Is told of what the worker sends and believes.
        shares: Decides what shares of a batch its gradients have.

    Attributes:
        waiting: The requests that are not answered yet, by range.
        done: Whether the run is complete, as it was told.
        most_batches: Batches that its shards have at most.
        stopped: Why it has given up, as the SDK raises it to the caller; empty if it has not.
    """

    def __init__(
        self, name: str, random: Random, overlap: bool, parts: Sequence[Layout], truth: Everywhere, shares: Random
    ) -> None:
        self.name = name
        self.overlap = overlap
        self.form: Format = random.choice([FLOAT32, FLOAT32, BFLOAT16, INT8])
        self.waiting: dict[int, Request] = {}
        self.done = False
        self.stopped = ""
        self.most_batches = 4
        self.truth = truth
        self._parts = parts
        self._encoders = [self.form.encoder(part.size) for part in parts]
        self._random, self._shares = random, shares
        self._operations = 0
        self._values: dict[int, Any] = {}  # of the operation's responses so far, by range
        self._errors: dict[int, GemError] = {}
        self._forget()

    def _forget(self) -> None:
        """Drops the lease and all that came with it, everywhere."""
        self.leader: LeaderRegistration | None = None
        self._refused: GemError | None = None  # by a peer, as it registered there
        self.registered = 0  # ranges
        self.entered = 0  # ranges whose θ it has
        self.sequence = 0
        self.versions = [0] * len(self._parts)
        self._before = [0] * len(self._parts)
        self._must_initialize = [False] * len(self._parts)
        self.shards: dict[int, int] = {}  # to the batches left

    @property
    def over(self) -> bool:
        return self.done or bool(self.stopped)

    @property
    def under_way(self) -> Known | None:
        """The commit that has not been answered by all ranges."""
        for request in self.waiting.values():
            if request.kind == "commit":
                return request.fields["lease"], request.fields["sequence"]
        return None

    def requests(self) -> list[Request]:
        """The requests to send now: those without a response again, or new ones."""
        if not self.waiting and not self.over:
            self._operations += 1
            self._values, self._errors = {}, {}
            kind, fields = self._choose()
            self.waiting = {index: Request(self.name, self._operations, kind, each, index) for index, each in fields.items()}
        return list(self.waiting.values())

    def answered(self, response: Response) -> None:
        request = response.request
        expected = self.waiting.get(request.index)
        if request is not expected:
            return  # a late answer to what was sent twice, or by a worker of the same name that has died
        if isinstance(response.error, TransportError | Overloaded):
            return
        if response.error is None:
            self._values[request.index] = response.value
        else:
            self._errors[request.index] = response.error
        if self.all_answered(request):
            self._finish(request.kind)

    def all_answered(self, request: Request) -> bool:
        """Takes a request as answered. Returns whether all ranges have answered the operation."""
        del self.waiting[request.index]
        return not self.waiting

    def _finish(self, kind: str) -> None:
        """Goes on once all ranges have answered."""
        ended = [index for index, error in self._errors.items() if isinstance(error, LeaseEnded)]
        if ended:
            self.register_again(ended, kind)
        else:
            getattr(self, f"_after_{kind}")()

    def register_again(self, ended: list[int], kind: str) -> None:
        """The lease has ended in some ranges: drops what is under way, and registers anew everywhere."""
        if kind == "commit":
            self.tear()
        self._forget()

    def tear(self) -> None:
        """Tells the truth that a commit may have reached some ranges only."""
        if self.leader is not None:
            self.truth.torn.add((self.leader.lease_id, self.sequence + 1))

    # -- what to do next

    def _choose(self) -> tuple[str, dict[int, dict[str, Any]]]:
        if self.leader is None:
            return "register", {0: {"overlap": self.overlap}}
        mine = {"lease": self.leader.lease_id}
        if self._refused is not None:
            return "renew", {0: mine}  # the leader may have begun another run meanwhile
        if self.registered < len(self._parts):
            return "register", {self.registered: {"overlap": self.overlap, "leader": self.leader}}
        if self.entered == len(self._parts) and self._random.random() < 0.03:
            self.entered = 0
        if self.entered < len(self._parts):
            index = self.next_to_enter()
            return ("initialize" if self._must_initialize[index] else "pull"), {index: mine}
        if not self.shards:
            return "shard", {0: {**mine, "holding": ()}}
        shard, batches = next(iter(self.shards.items()))
        if not batches:
            return "complete", {0: {**mine, "shard": shard}}
        self.truth.shards[self.leader.lease_id, self.sequence + 1] = shard
        return "commit", {index: {**mine, **fields} for index, fields in enumerate(self._commits())}

    def next_to_enter(self) -> int:
        """The range whose θ it asks for next: one after the other, so that nobody waits in a circle."""
        return self.entered

    def _commits(self) -> list[dict[str, Any]]:
        """The parts of a commit, one for each range. Sometimes one holds a NaN."""
        older = self.overlap and self._random.random() < 0.5
        bad = self._random.randrange(len(self._parts)) if self.form is FLOAT32 and self._random.random() < 0.05 else None
        share, commits = self._shares.choice([0.0, 1.0, 0.1, 0.3, 0.5, 0.7]), []
        for index, part in enumerate(self._parts):
            gradient = np.array([self._random.gauss(0, 1) for _ in range(part.size)], np.float32)
            if index == bad:
                gradient[self._random.randrange(part.size)] = np.nan
            base = (self._before if older else self.versions)[index]
            payload = encoded(self._encoders[index], gradient)
            head = {"sequence": self.sequence + 1, "base": base, "dtype": self.form.dtype, "share": share}
            commits.append({**head, "payload": payload})
        return commits

    # -- what became of it

    def _after_register(self) -> None:
        index = self.registered
        if index in self._errors:
            self._refused = self._errors[index]
            return
        joined, answer = self._values[index]
        self._must_initialize[index] = joined.must_initialize
        self.leader = self.leader or answer
        self.registered += 1

    def _after_renew(self) -> None:
        """The leader knows the lease: what a peer has against it, it will have again."""
        assert self._refused is not None
        self._stop(self._refused)

    def _after_initialize(self) -> None:
        for index in (*self._values, *self._errors):  # after an error, the first try did arrive
            self._must_initialize[index] = False
        self._require_no_other_errors(InvalidRequest)

    def _after_pull(self) -> None:
        self._require_no_other_errors()
        for index, version in self._values.items():
            if version is not None:
                self._before[index] = self.versions[index] = version
                self.entered += 1
            elif index and self.versions[0]:
                self._stop(InvalidRequest(f"range {index} has lost its data: the leader is at version {self.versions[0]}"))
            else:
                self._must_initialize[index] = True

    def _after_shard(self) -> None:
        self._require_no_other_errors()
        if (value := self._values[0]) is not None:
            self.done = value == "complete"
            if not self.done:
                self.shards[value.shard_id] = self.truth.batches[value.shard_id] = self._random.randint(1, self.most_batches)

    def _after_complete(self) -> None:
        self._require_no_other_errors()
        self.shards.clear()

    def _after_commit(self) -> None:
        """A range may have rejected its part: if there are others, the sequence is used up. The batch is trained on again."""
        self._require_no_other_errors(RejectedCommit)
        assert self.leader is not None
        if self._errors and len(self._parts) == 1:
            return  # nobody has applied it: the next one has the same number
        self.sequence += 1
        for index, applied in self._values.items():
            self._encoders[index].applied()
            self._before[index], self.versions[index] = self.versions[index], applied.base_version
        if not self._errors:
            self.truth.acknowledges((self.leader.lease_id, self.sequence))
            self.shards[next(iter(self.shards))] -= 1

    def _require_no_other_errors(self, *expected: type[GemError]) -> None:
        for index, error in self._errors.items():
            if not isinstance(error, expected) or isinstance(error, SequenceGap):
                raise AssertionError(f"{self.name}: range {index} refuses: {error!r}")

    def _stop(self, error: GemError) -> None:
        self.stopped = str(error)


def encoded(encoder: Encoder, gradient: NDArray[np.float32]) -> bytes:
    """A gradient in its wire format."""
    return b"".join(bytes(data) for data in _payloads(encoder, gradient))


def _payloads(encoder: Encoder, gradient: NDArray[np.float32]) -> Iterator[Any]:
    for frame in encoder.frames(gradient):
        chunk = parse_frame(frame, pb.CommitRequest).chunk
        assert chunk is not None
        yield chunk.data
