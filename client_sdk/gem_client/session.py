"""A worker's session with the server: join, pull, commit, and everything that makes that safe to repeat."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt
from gem_api.errors import GemError, InvalidRequest, LayoutMismatch, LeaseEnded, RejectedCommit, TransportError, UnknownRegion
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.memory import tune_allocator
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb

from gem_client.background import Background
from gem_client.connection import Connection
from gem_client.retry import Retry
from gem_client.shards import Shards

log = logging.getLogger("gem_client")


@dataclass(frozen=True)
class Answer:
    """What a commit brought back.

    Attributes:
        theta: The central variable that the next gradient is computed on: float32, shape (P,). The session's own
            buffer, overwritten by the next pull or commit.
        version: Its version.
        staleness: τ, commits that others had applied between this worker's pull and its commit (Eq. 2).
        pi_median: Median of the scaling factor π; None for a rule without one.
        dropped: Whether the gradient was not applied because the lease had ended; `theta` is fresh all the same.
    """

    theta: Vector
    version: int
    staleness: int = 0
    pi_median: float | None = None
    dropped: bool = False


def connect(
    address: str,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: float = 60.0,
    shared_memory: bool = True,
) -> Session:
    """Opens a session with the server at "host:port". Nothing is sent before its first use.

    Args:
        address: The server's address.
        name: What this worker calls itself; unique within the run. Host, process and a random suffix if not given.
        retry: How long to try again while the server can't be reached.
        timeout: Seconds without any progress after which a call is broken off and tried again.
        shared_memory: Whether to share memory with a server on the same machine, instead of sending tensors to it. With
            a server elsewhere it makes no difference.
    """
    return Session(address, name=name, retry=retry or Retry(), timeout=timeout, shared_memory=shared_memory)


class Session:
    """One worker's place in a run. Use it from one thread, as a context manager; at its end the worker leaves the run.

    A call that does not get through is repeated with backoff until `retry` gives up; the server applies a commit only
    once, however often it is sent. If the lease ends (a long silence, or a server that came back from an older
    checkpoint), the session registers again and drops the gradient in hand.

    Attributes:
        name: The worker's name.
    """

    def __init__(self, address: str, *, name: str | None, retry: Retry, timeout: float, shared_memory: bool) -> None:
        tune_allocator()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._address = address
        self._retry = retry
        self._background = Background(weakref.WeakMethod(self._renew), timeout)
        self._connection = Connection(address, timeout, self._background)
        self._place: pb.RegisterWorkerResponse | None = None
        self._layout: Layout | None = None
        self._theta = empty(0)
        self._gradient = empty(0)
        self._wants_region = shared_memory
        self._nonce = b""  # of the region that θ and the gradient lie in; empty where they go over the network
        self._version = 0
        self._sequence = 0
        self._steps_done = 0
        self._generation = 0  # leases held so far
        self._handed_out = 0  # the generation whose θ the caller has
        self._in_doubt = False  # something was broken off half-way: the server may or may not have taken it
        self._replaced: LeaseEnded | None = None
        self._shards: Shards | None = None
        self._process = os.getpid()
        self._closed = False

    # -- what the caller may read

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The run's settings. Raises InvalidRequest before `join`."""
        return Hyperparameters.from_message(self._joined().hyperparameters)

    @property
    def layout(self) -> Layout:
        """The run's tensors. Raises InvalidRequest before the first `join` or `pull`."""
        if self._layout is None:
            raise InvalidRequest("the layout is not known yet: join or pull first")
        return self._layout

    @property
    def run_id(self) -> str:
        """Names the run. Raises InvalidRequest before `join`."""
        return self._joined().run_id

    @property
    def theta(self) -> Vector:
        """θ as last received: float32, shape (P,), the session's own buffer (another one after the loss of a lease)."""
        return self._theta

    @property
    def gradient(self) -> Vector:
        """A buffer for the next gradient: float32, shape (P,). What is put together here is committed without a copy where
        memory is shared with the server. Like `theta`, another one after the loss of a lease."""
        return self._gradient

    @property
    def shares_memory(self) -> bool:
        """Whether commits pass through memory that is shared with the server, instead of the network."""
        return bool(self._nonce)

    @property
    def version(self) -> int:
        """Version of `theta`."""
        return self._version

    @property
    def steps_done(self) -> int:
        """Commits applied under this worker's name in this run."""
        return self._steps_done

    @property
    def generation(self) -> int:
        """How many leases the session has held: changes when it had to register again."""
        return self._generation

    # -- joining, reading, committing

    def join(self, parameters: Mapping[str, npt.ArrayLike]) -> Vector:
        """Joins the run with a model of these parameters and returns θ: float32, shape (P,).

        Args:
            parameters: Name to array, in the order that all workers share. The values become θ's first value if this
                is the worker that is asked for it; otherwise only names and shapes count.

        Raises:
            LayoutMismatch: The model is not the run's.
            Overloaded: The server has no room, and had none for as long as `retry` allows.
            NonFiniteGradient: The first value holds a NaN or an infinity.
        """
        self._require_usable()
        if self._place is not None:
            raise InvalidRequest("this session has joined already: open another session for another model")
        arrays = {name: np.asarray(value) for name, value in parameters.items()}
        layout = Layout.of({name: array.shape for name, array in arrays.items()})
        self._layout, self._theta, self._gradient = layout, empty(layout.size), empty(layout.size)
        layout.pack(arrays, self._theta)
        try:
            self._enter()
        except BaseException:
            self._leave()  # not joined: nobody shall wait for this try, and the caller may make another
            self._place = None
            raise
        return self._hand_out()

    def pull(self) -> Vector:
        """Reads the present θ: float32, shape (P,), the session's own buffer. Works before `join` too, without a lease."""
        self._require_usable()
        if self._place is None:
            self._retry.call(lambda: self._pull(""), self._report)
            return self._theta
        self._settle_doubt()
        while True:
            try:
                self._retry.call(self._pull_own, self._report)
                return self._hand_out()
            except LeaseEnded as ended:
                self._enter_again(ended)

    def commit(
        self,
        gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        loss: float | None = None,
        samples: int | None = None,
        batches: int = 1,
    ) -> Answer:
        """Commits a gradient and returns what the next one is computed on. One round trip.

        Args:
            gradient: float, shape (P,), in the layout's order; or name to array.
            loss: Training loss on the batch, reported with the commit.
            samples: Samples that the gradient was computed on. By default those of the batches that it completes.
            batches: How many batches of the session's shards it completes, where gradients are accumulated.

        Raises:
            LayoutMismatch: The gradient's shape is not the model's.
            NonFiniteGradient: It holds a NaN, an infinity or a far too large value; θ is untouched.
            TransportError: The server could not be reached for as long as `retry` allows.
        """
        self._require_usable()
        packed = self._pack(gradient)
        self._settle_doubt()
        if self._handed_out != self._generation:
            return self._dropped(batches)
        header = self._header(loss, samples, batches)
        self._in_doubt = True  # until it is known what became of it, whatever interrupts this call
        try:
            result = self._retry.call(lambda: self._exchange(header, packed), self._report)
        except RejectedCommit:
            # The server did not take it: the sequence is free for the next one. The batch will be refused every time, so a
            # caller that goes on leaves it out.
            self._in_doubt = False
            self._complete(batches)
            raise
        except LeaseEnded as ended:
            self._enter_again(ended)
            return self._dropped(batches)
        self._sequence, self._version = result.sequence, result.base_version
        self._in_doubt = False
        self._steps_done += 1
        self._complete(batches)
        pi_median = result.pi.median if result.HasField("pi") else None
        return Answer(self._theta, self._version, result.staleness, pi_median)

    def _exchange(self, header: pb.CommitHeader, packed: Vector) -> pb.CommitResult:
        """Sends a commit, once; a server that was restarted in between shares memory anew, or gets chunks."""
        shared_again = False
        while True:
            header.region = self._nonce
            try:
                return self._connection.commit(header, packed, self._theta)
            except UnknownRegion:
                self._nonce = b""
                if not shared_again:
                    self._share_memory()
                shared_again = True

    def shards(self, samples: int, batch_size: int | None = None) -> Shards:
        """Batches of sample indices from leased shards; each commit of this session then completes the oldest batch.

        Args:
            samples: Size of the training set.
            batch_size: Indices per batch; the run's batch size by default.
        """
        if self._shards is not None:
            raise InvalidRequest("this session hands out shards already: use those")
        self._shards = Shards(self, samples, batch_size or self.hyperparameters.batch_size)
        return self._shards

    def close(self) -> None:
        """Leaves the run and closes the connection. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # a fork's copy: the lease is the parent's
        self._background.close()
        self._connection.drop_stream()
        self._leave()
        self._connection.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- shards, for `Shards`

    def lease_shard(self, samples: int, holding: Collection[int]) -> pb.LeaseShardResponse:
        """Asks for a shard under the present lease, or a new one if that has ended; keeps the shards `holding`."""
        self._require_usable()
        self._settle_doubt()
        while True:
            try:
                return self._retry.call(
                    partial(self._connection.lease_shard, self._joined().lease_id, samples, holding), self._report
                )
            except LeaseEnded as ended:
                self._enter_again(ended)

    def complete_shard(self, shard_id: int) -> None:
        """Reports a shard as done; where that fails, it goes back with the next `lease_shard` and is trained on again."""
        place = self._joined()
        with contextlib.suppress(LeaseEnded, TransportError):
            self._retry.call(lambda: self._connection.complete_shard(place.lease_id, shard_id), self._report)

    # -- leases

    def _enter(self) -> None:
        """Registers and pulls, initialising θ if asked to, until all of it has worked under one lease."""
        self._in_doubt = True
        while True:
            try:
                self._register()
                while self._retry.call(self._pull_own, self._report):
                    self._initialize()
                self._in_doubt = False
                return
            except LeaseEnded as ended:
                self._require_not_replaced(ended)

    def _enter_again(self, ended: LeaseEnded) -> None:
        self._require_not_replaced(ended)
        log.warning("%s: the lease ended (%s); registering again and dropping the gradient in hand", self.name, ended.reason)
        self._enter()

    def _leave(self) -> None:
        if self._place is None:
            return
        try:
            self._connection.leave(self._place.lease_id, timeout=2.0)
        except GemError as error:
            log.info("could not say good-bye; the lease will expire by itself: %s", error)

    def _register(self) -> None:
        previous, layout = self._place, self.layout
        self._connection.drop_stream()
        place = self._retry.call(lambda: self._connection.register(self.name, layout), self._report)
        if previous is not None and previous.run_id != place.run_id:
            log.warning("%s: the server has begun another run (%s); going on with that", self.name, place.run_id)
        self._place, self._sequence, self._steps_done = place, 0, place.steps_done
        self._generation += 1
        self._background.start(place.lease_seconds / 3)
        self._share_memory()
        if place.must_initialize:
            self._initialize()

    def _share_memory(self) -> None:
        """Moves θ and the gradient to memory shared with the server, where that is on this machine and willing."""
        region = self._connection.share_memory(self._joined().lease_id, self.layout.size) if self._wants_region else None
        self._nonce = region.nonce if region is not None else b""
        if region is not None:
            np.copyto(region.answer, self._theta)
            np.copyto(region.gradient, self._gradient)
            self._theta, self._gradient = region.answer, region.gradient

    def _initialize(self) -> None:
        """Gives θ its first value: what the caller joined with, or after the loss of a server the θ last received."""
        place = self._joined()
        try:
            self._retry.call(lambda: self._connection.initialize(place.lease_id, self._theta), self._report)
        except InvalidRequest as error:  # the first try did arrive, and only its answer was lost
            log.info("%s: θ has a first value already: %s", self.name, error)

    def _pull_own(self) -> bool:
        return self._pull(self._joined().lease_id)

    def _pull(self, lease_id: str) -> bool:
        """Reads θ, once; returns whether this worker must give θ its first value instead."""
        header = self._connection.pull(lease_id, self._room_for)
        if not header.must_initialize:
            self._version = header.version
        return header.must_initialize

    def _room_for(self, header: pb.PullHeader) -> Vector:
        if header.HasField("layout"):
            self._layout = Layout.from_message(header.layout)
        if self._theta.size != self.layout.size:
            self._theta = empty(self.layout.size)
        return self._theta

    def _renew(self) -> None:
        if self._place is not None:
            self._connection.renew(self._place.lease_id)

    def _settle_doubt(self) -> None:
        """After a commit or a registration that was broken off, only a new lease is in a known state."""
        if self._in_doubt:
            self._enter()

    def _require_not_replaced(self, ended: LeaseEnded) -> None:
        if ended.reason == "replaced":
            message = f"another worker has registered as {self.name!r}: give each worker a name of its own"
            self._replaced = LeaseEnded(message, ended.reason)
            raise self._replaced

    # -- small parts

    def _complete(self, batches: int) -> None:
        if self._shards is not None:
            self._shards.committed(batches)

    def _hand_out(self) -> Vector:
        self._handed_out = self._generation
        return self._theta

    def _dropped(self, batches: int) -> Answer:
        if self._shards is not None:
            self._shards.dropped(batches)
        return Answer(self._hand_out(), self._version, dropped=True)

    def _header(self, loss: float | None, samples: int | None, batches: int) -> pb.CommitHeader:
        place = self._joined()
        if samples is None:
            samples = self._shards.samples_in(batches) if self._shards is not None else 0
        return pb.CommitHeader(
            lease_id=place.lease_id,
            sequence=self._sequence + 1,
            base_version=self._version,
            wire_dtype=tensors_pb2.WIRE_DTYPE_FLOAT32,
            layout_fingerprint=place.layout_fingerprint,
            loss=None if loss is None else float(loss),
            sample_count=samples,
        )

    def _pack(self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Vector:
        self._joined()
        if isinstance(gradient, Mapping):
            return self.layout.pack(gradient, self._gradient)
        array = np.asarray(gradient)
        if array.shape != (self.layout.size,):
            raise LayoutMismatch(f"the gradient has shape {array.shape}, the model's is ({self.layout.size},)")
        if not np.issubdtype(array.dtype, np.floating):
            raise LayoutMismatch(f"the gradient has dtype {array.dtype}: give floats")
        if not self._nonce:
            return np.ascontiguousarray(array, dtype="<f4")
        if array is not self._gradient:
            np.copyto(self._gradient, array, casting="same_kind")
        return self._gradient

    def _joined(self) -> pb.RegisterWorkerResponse:
        if self._place is None:
            raise InvalidRequest("this session has not joined a run yet: call join with the model's parameters first")
        return self._place

    def _require_usable(self) -> None:
        if self._closed:
            raise InvalidRequest("this session is closed: open another with gem_client.connect")
        if self._replaced is not None:
            raise self._replaced  # registering again would only throw the other one out
        if os.getpid() != self._process:
            raise InvalidRequest("this session belongs to the process that opened it: open another one after the fork")

    def _report(self, error: GemError, pause: float) -> None:
        log.warning("%s: %s answers with %s; trying again in %.1f s", self.name, self._address, error, pause)
