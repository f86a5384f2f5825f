"""A worker's session with the server: join, pull, commit, and everything that makes that safe to repeat."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from gem_api.errors import GemError, InvalidRequest, LeaseEnded, RejectedCommit, TransportError
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.process.allocator import tune_allocator
from gem_api.schedule import rate
from gem_api.update_kind import KINDS, UpdateKind, kind_of
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Format, ThetaFormat, gradient_format, theta_format

from gem_client.commit_sender import Carrier
from gem_client.membership import Membership
from gem_client.retry import Retry
from gem_client.shards import Batch, LeasedShard, Shards
from gem_client.transport.connection import Connection
from gem_client.transport.security import Security, Source
from gem_client.transport.side_thread import SideThread

log = logging.getLogger("gem_client")
FINAL_POLL_SECONDS = 0.5
P = ParamSpec("P")
T = TypeVar("T")


class Base(NamedTuple):
    """Names a θ that a session handed out: its version, and under which of the session's leases."""

    version: int
    generation: int


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
        discarded: Whether the run's rule has left it out as too stale; `theta` is fresh all the same.
    """

    theta: Vector
    version: int
    staleness: int = 0
    pi_median: float | None = None
    dropped: bool = False
    discarded: bool = False


def connect(
    address: str,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: float = 60.0,
    shared_memory: bool = True,
    gradient_dtype: str = "float32",
    theta_dtype: str = "float32",
    token: str | None = None,
    tls_ca: Source | None = None,
    tls_cert: Source | None = None,
    tls_key: Source | None = None,
) -> Session:
    """Opens a session with the server at "host:port". Nothing is sent before its first use.

    Args:
        address: The server's "host:port": a name, an IPv4 address or an IPv6 address in brackets ("[::1]:50051"). The port
            is 50051 if not given. gRPC's own forms, such as "unix:/path", are taken too.
        name: What this worker calls itself; unique within the run. Host, process and a random suffix if not given.
        retry: How long to try again while the server can't be reached.
        timeout: Seconds without any progress after which a call is broken off and tried again.
        shared_memory: Whether to share memory with a server on the same machine, instead of sending tensors to it. With
            a server elsewhere it makes no difference.
        gradient_dtype: How gradients go over the network: "float32", "bfloat16", "float16" or "int8" (blocks with a scale
            each and error feedback). In shared memory they are float32.
        theta_dtype: How θ comes back over the network: "float32", "bfloat16" or "float16".
        token: What a server with --tokens asks for. The SDK reads no file or variable by itself.
        tls_ca: PEM file of the authorities that the server's certificate must come from; the connection is encrypted then.
        tls_cert: PEM file of this client's own certificate, which a server with --tls-client-ca asks for.
        tls_key: PEM file of its private key.

    Raises:
        InvalidRequest: `address` is not an address, there is no such dtype, a file can't be read, or the token is none.
    """
    return Session(
        address,
        name=name,
        retry=retry or Retry(),
        timeout=timeout,
        shared_memory=shared_memory,
        gradient_format=gradient_format(gradient_dtype),
        theta_format=theta_format(theta_dtype),
        security=Security(token, tls_ca, tls_cert, tls_key),
    )


class Session:
    """One worker's place in a run. Use it from one thread, as a context manager; at its end the worker leaves the run.

    A call that does not get through is repeated with backoff until `retry` gives up; the server applies a commit only
    once, however often it is sent. If the lease ends (a long silence, or a server that came back from an older
    checkpoint), the session registers again and drops the gradient in hand.

    Attributes:
        name: The worker's name.
        batches_per_commit: Batches of its shards that a commit completes: 1, unless gradients are accumulated or steps local.
            The run's limit of steps counts commits; this says how many batches they are.
        skipped: Batches that were left out of the run by `skip`.
        pull_only_reads: Whether `pull` does what `read` does, because an `Optimizer` takes θ for its parameters itself.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str | None,
        retry: Retry,
        timeout: float,
        shared_memory: bool,
        gradient_format: Format,
        theta_format: ThetaFormat,
        security: Security,
    ) -> None:
        tune_allocator()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.batches_per_commit = 1
        self.skipped = 0
        self._window: list[Batch] = []  # of local steps that the next commit holds
        self.pull_only_reads = False
        self._retry = retry
        self._connection = Connection(address, timeout, weakref.WeakMethod(self._renew), security)
        self._member = Membership(self.name, self._connection, retry, shared_memory, theta_format)
        self._carrier = Carrier(self._member, self._connection, retry, gradient_format)
        self._shards: Shards | None = None
        self._handed_out = Base(0, 0)
        # What is done while the caller computes: a commit under way, shards. One thing at a time uses the connection.
        self._side = SideThread("gem-session-side")
        self._lock = threading.RLock()
        self._under_way: Future[Answer] | None = None
        self._completing: Future[None] | None = None
        self._process = os.getpid()

    # -- what the caller may read

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The run's settings. Raises InvalidRequest before `join`."""
        return Hyperparameters.from_message(self._member.registration.hyperparameters)

    @property
    def update_kind(self) -> UpdateKind:
        """What the run's rule takes: "gradient", or "delta", what local steps changed the worker's parameters by. Raises
        InvalidRequest before `join`."""
        return kind_of(self._member.registration.update_kind)

    @property
    def learning_rate(self) -> float:
        """η_t at the version that was handed out last: the rate of local steps. Raises InvalidRequest before `join`."""
        return rate(self.hyperparameters, self._handed_out.version)

    @property
    def layout(self) -> Layout:
        """The run's tensors. Raises InvalidRequest before the first `join` or `pull`."""
        return self._member.known_layout

    @property
    def run_id(self) -> str:
        """Names the run. Raises InvalidRequest before `join`."""
        return self._member.registration.run_id

    @property
    def theta(self) -> Vector:
        """θ as last received: float32, shape (P,), the session's own buffer (another one after the loss of a lease)."""
        return self._member.theta

    @property
    def gradient(self) -> Vector:
        """A buffer for the next gradient: float32, shape (P,). What is put together here is committed without a copy where
        memory is shared with the server. Like `theta`, another one after the loss of a lease."""
        return self._member.gradient

    @property
    def shares_memory(self) -> bool:
        """Whether commits pass through memory that is shared with the server, instead of the network."""
        return bool(self._member.region)

    @property
    def version(self) -> int:
        """Version of `theta`."""
        return self._member.version

    @property
    def base(self) -> Base:
        """Names the θ that was handed out last; `commit` takes it where a gradient was computed on an earlier one."""
        return self._handed_out

    @property
    def steps_done(self) -> int:
        """Commits applied under this worker's name in this run."""
        return self._member.steps_done

    @property
    def generation(self) -> int:
        """How many leases the session has held: changes when it had to register again."""
        return self._member.generation

    # -- joining, reading, committing

    def join(
        self, parameters: Mapping[str, npt.ArrayLike] | Iterable[tuple[str, npt.ArrayLike]], *, overlap: bool = False
    ) -> Vector:
        """Joins the run with a model of these parameters and returns θ: float32, shape (P,).

        Args:
            parameters: Name to array, or pairs of both, in the order that all workers share. The values become θ's first
                value if this is the worker that is asked for it; otherwise only names and shapes count.
            overlap: Whether the worker will compute while a commit is under way (`begin_commit`): the server keeps one more
                snapshot for it then, P·4 bytes.

        Raises:
            InvalidRequest: A name is given twice.
            LayoutMismatch: The model is not the run's.
            Overloaded: The server has no room, and had none for as long as `retry` allows.
            NonFiniteGradient: The first value holds a NaN or an infinity.
            Quarantined: Too many gradients of a worker of this name were refused.
        """
        self._require_usable()
        if self._member.joined:
            raise InvalidRequest("this session has joined already: open another session for another model")
        pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
        named = [(name, np.asarray(value)) for name, value in pairs]
        layout, arrays = Layout.of((name, array.shape) for name, array in named), dict(named)
        with self._lock:
            self._member.make_room(layout)
            self._member.overlap = overlap
            layout.pack(arrays, self._member.theta)
            try:
                self._member.enter()
                self._carrier.prepare()
            except BaseException:
                self._member.leave()  # not joined: nobody shall wait for this try, and the caller may make another
                self._member.forget()
                raise
            return self._hand_out()

    def pull(self) -> Vector:
        """Takes the present θ to compute the next gradient on: float32, shape (P,), the session's own buffer.

        The server counts the next commit's staleness, and GEM its π, from this θ. Use `read` to look at θ without that.
        Works before `join` too, without a lease. A `gem_client.torch.Optimizer` takes θ itself: beside one, `pull` is the same
        as `read`.
        """
        if self.pull_only_reads:
            return self.read()
        self._require_usable()
        if self._member.joined:
            return self.take_theta()
        with self._lock:
            self._retry.call(lambda: self._member.pull(""), self._member.report)
            return self._member.theta

    def read(self) -> Vector:
        """Reads the present θ, for example to evaluate it: float32, shape (P,), a buffer of the caller's own.

        Nothing changes for the session: the next commit is still based on the θ handed out last. Waits for a commit under way.
        """
        self._require_usable()
        with self._lock:
            return self._retry.call(self._member.read, self._member.report)

    def take_theta(self) -> Vector:
        """`pull` under the lease, for `Optimizer`."""
        self._require_usable()
        with self._lock:
            self._member.settle_doubt()
            while True:
                try:
                    self._member.retry_pull()
                    return self._hand_out()
                except LeaseEnded as ended:
                    self._member.enter_again(ended)

    def commit(
        self,
        gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        loss: float | None = None,
        samples: int | None = None,
        batches: int = 1,
        base: Base | None = None,
        kind: UpdateKind = "gradient",
        decay: bool = True,
    ) -> Answer:
        """Commits a gradient, or a delta, and returns what the next one is computed on. One round trip.

        In a run with weight decay, weight_decay·θ is added to a gradient on the way, θ being what was handed out last; where it
        lies in the session's own `gradient`, in place. To a delta nothing is added: its local steps have had theirs.

        Args:
            gradient: float, shape (P,), in the layout's order; or name to array.
            loss: Training loss on the batch, reported with the commit.
            samples: Samples that the gradient was computed on. By default those of the batches that it completes.
            batches: How many batches of the session's shards it completes, if gradients are accumulated; fewer if fewer were
                handed out since the last commit.
            base: What it was computed on: the θ handed out last, by default.
            kind: What it is: "gradient", or "delta", the parameters after local steps less those before. The run takes
                one of the two, `update_kind`.
            decay: Whether weight decay is still to be added to a gradient.

        Raises:
            InvalidRequest: It is not of the kind that the run takes.
            LayoutMismatch: The gradient's shape is not the model's.
            NonFiniteGradient: It holds a NaN, an infinity or a far too large value; θ is untouched.
            NormOutOfBounds: Its norm is beyond the bound of a server that has one; θ is untouched.
            Quarantined: Too many in a row were refused: an operator has to let this worker in again.
            TransportError: The server could not be reached for as long as `retry` allows.
        """
        self._require_usable()
        with self._lock:
            packed = self._packed(gradient, kind, decay)
            claimed = self._claim(batches)
            return self._commit(packed, kind, loss, _samples(samples, claimed), claimed, base or self._handed_out)

    def begin_commit(
        self,
        gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        loss: float | None = None,
        samples: int | None = None,
        batches: int = 1,
        base: Base | None = None,
        kind: UpdateKind = "gradient",
        decay: bool = True,
    ) -> None:
        """Like `commit`, but returns at once; `finish_commit` gives the answer. Until then leave `gradient` and `theta` alone.

        Weight decay is taken at the θ handed out last here too. Where the gradient was computed on the one before that, and its
        decay is to be so too, add it yourself and say `decay=False`.

        Raises:
            InvalidRequest: Another commit is under way, or the session has not joined with `overlap`.
            LayoutMismatch: The gradient's shape is not the model's.
        """
        self._require_usable()
        if self._under_way is not None or not self._member.overlap:
            raise InvalidRequest("one commit at a time can be under way, in a session that joined with overlap=True")
        with self._lock:
            packed = self._packed(gradient, kind, decay)
        claimed, base = self._claim(batches), base or self._handed_out
        counted = _samples(samples, claimed)
        self._under_way = self._side.submit(self._locked, self._commit, packed, kind, loss, counted, claimed, base)

    def finish_commit(self) -> Answer | None:
        """Waits for the commit under way and returns its answer, or raises as `commit` does; None if there is none."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way is not None else None

    def shards(self, samples: int, batch_size: int | None = None) -> Shards:
        """Batches of sample indices from leased shards; each commit of this session then completes the batch in hand.

        Args:
            samples: Size of the training set.
            batch_size: Indices per batch; the run's batch size by default.
        """
        if self._shards is not None:
            raise InvalidRequest("this session hands out shards already: use those")
        settings = self.hyperparameters
        batch_size = batch_size or settings.batch_size
        if batch_size > settings.shard_size:
            log.warning(
                "batches have at most %d samples instead of %d, the run's shard size: start the run with a larger --shard-size",
                settings.shard_size, batch_size,
            )  # fmt: skip
        self._shards = Shards(self, samples, batch_size)
        return self._shards

    def skip(self, batches: int = 1) -> None:
        """Leaves batches out of the run that are not going to be committed, the youngest in hand: nobody trains on them in this
        epoch. Without it a batch that is not committed goes back to the server, and its shard is trained on again.

        Raises:
            InvalidRequest: The loop does not have so many batches that are still to be committed.
        """
        self._require_usable()
        if self._shards is None:
            raise InvalidRequest("no batch can be skipped: this session hands out none. Make a sampler first")
        self._shards.skip(batches)
        self.skipped += batches

    def pull_final(self) -> Vector:
        """Leaves the run, waits until it is over, and returns its final θ: float32, shape (P,), the session's own buffer.

        A run is over when every sample of every epoch was trained on; or when no worker is left in it, as a run that ends by
        its steps is never complete; or when the server drains. Every worker that calls this gets the same θ.

        Raises:
            RejectedCommit: What became of the commit under way.
            TransportError: The server could not be reached for as long as `retry` allows.
        """
        self._require_usable()
        self.finish_commit()
        if self._completing is not None:
            self._completing.result()
        with self._lock:
            self._connection.drop_stream()
            self._member.leave()
            self._member.forget()  # so that the lease is renewed no more
            while not self._over(self._retry.call(self._connection.status, self._member.report)):
                self._retry.sleep(FINAL_POLL_SECONDS)
            self._retry.call(lambda: self._member.pull(""), self._member.report)
            return self._member.theta

    def close(self) -> None:
        """Leaves the run and closes the connection, once a commit under way is through. Does nothing the second time."""
        if not self._member.closed and os.getpid() == self._process:
            try:
                self.finish_commit()
            except GemError as error:
                log.warning("%s: the last commit failed: %s", self.name, error)
            if self._completing is not None:
                self._completing.result()
        self._end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._end()  # whatever is under way is broken off: nobody waits for its answer

    def _end(self) -> None:
        if self._member.closed:
            return
        self._member.closed = True
        if os.getpid() != self._process:
            return  # a fork's copy: the lease is the parent's
        self._side.close()
        if self.skipped:
            log.info("%s: %d batches were skipped", self.name, self.skipped)
        self._connection.stop()
        self._member.leave()
        self._connection.close()

    # -- shards, for `Shards`

    def lease_shard(self, samples: int, holding: Collection[int]) -> Future[LeasedShard]:
        """Asks for a shard of `samples`, under the present lease or a new one if that has ended; keeps the shards `holding`."""
        self._require_usable()
        return self._side.submit(self._locked, self._lease_shard, samples, holding)

    def complete_shard(self, shard_id: int) -> None:
        """Reports a shard as done; where that fails, it goes back with the next `lease_shard` and is trained on again."""
        self._completing = self._side.submit(self._locked, self._complete_shard, self._member.registration.lease_id, shard_id)

    def wait_for_commit(self) -> None:
        """Waits for the commit under way, if there is one; `finish_commit` still gives its answer."""
        if self._under_way is not None:
            wait([self._under_way])

    @property
    def batches_in_hand(self) -> int:
        """Batches of the session's shards that no commit and no skip covers yet; 0 if that is not known."""
        return self._shards.in_hand if self._shards is not None else 0

    def add_to_window(self, batches: int) -> None:
        """The batches in hand belong to a local step: the next commit completes them, besides those that it names."""
        if self._shards is not None:
            self._window += self._shards.claim(batches)

    def _lease_shard(self, samples: int, holding: Collection[int]) -> LeasedShard:
        self._member.settle_doubt()
        while True:
            try:
                response = self._retry.call(
                    lambda: self._connection.lease_shard(self._member.registration.lease_id, samples, holding),
                    self._member.report,
                )
                return LeasedShard(response, self.generation)
            except LeaseEnded as ended:
                self._member.enter_again(ended)

    def _complete_shard(self, lease_id: str, shard_id: int) -> None:
        with contextlib.suppress(LeaseEnded, TransportError):
            self._retry.call(lambda: self._connection.complete_shard(lease_id, shard_id), self._member.report)

    # -- one commit

    def _commit(
        self, packed: Vector, kind: UpdateKind, loss: float | None, samples: int, claimed: Sequence[Batch], base: Base
    ) -> Answer:
        try:
            answer = self._carry(packed, kind, loss, samples, base)
        except RejectedCommit:
            self._complete(claimed)  # it will be refused every time, so a caller that goes on leaves its batches out
            raise
        except BaseException:
            self._give_back(claimed)  # it may or may not have arrived: rather trained on twice than never
            raise
        if answer.dropped:
            self._give_back(claimed)
        else:
            self._complete(claimed)
        return answer

    def _carry(self, packed: Vector, kind: UpdateKind, loss: float | None, samples: int, base: Base) -> Answer:
        member = self._member
        if base.generation != member.generation:
            return self._dropped()
        member.in_doubt = True  # until it is known what became of it, whatever interrupts this call
        try:
            result = self._carrier.carry(packed, kind, loss, samples, base.version)
        except RejectedCommit:
            member.in_doubt = False  # the server did not take it: the sequence is free for the next one
            raise
        except LeaseEnded as ended:
            member.enter_again(ended)
            return self._dropped()
        member.sequence, member.version = result.sequence, result.base_version
        member.in_doubt = False
        member.steps_done += 1
        pi_median = result.pi.median if result.HasField("pi") else None
        return Answer(self._hand_out(), member.version, result.staleness, pi_median, discarded=result.discarded)

    # -- small parts

    def _locked(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        with self._lock:
            return work(*arguments, **named)

    def _packed(self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike], kind: UpdateKind, decay: bool) -> Vector:
        """What is to be carried, weight decay included: float32, shape (P,)."""
        if kind not in KINDS:
            raise InvalidRequest(f"a commit is of kind {' or '.join(KINDS)}, not {kind!r}")
        self._member.settle_doubt()  # before a commit that was broken off may see the next gradient in its memory
        packed = self._carrier.pack(gradient)
        weight_decay = self._member.registration.hyperparameters.weight_decay
        if kind == "delta" or not decay or not weight_decay:
            return packed
        # Into the session's own buffer: the caller's array is not to change.
        own = self._member.gradient
        np.add(packed, np.float32(weight_decay) * self._member.theta, out=own)
        return own

    def _claim(self, batches: int) -> list[Batch]:
        """The batches that the next commit completes: of the window of local steps, and so many of those in hand."""
        if self._shards is None:
            return []
        claimed, self._window = [*self._window, *self._shards.claim(batches)], []
        return claimed

    def _complete(self, claimed: Sequence[Batch]) -> None:
        if self._shards is not None:
            self._shards.committed(claimed)

    def _give_back(self, claimed: Sequence[Batch]) -> None:
        if self._shards is not None:
            self._shards.dropped(claimed)

    def _hand_out(self) -> Vector:
        self._handed_out = Base(self._member.version, self._member.generation)
        return self._member.theta

    def _dropped(self) -> Answer:
        return Answer(self._hand_out(), self._member.version, dropped=True)

    def _over(self, status: pb.GetStatusResponse) -> bool:
        """Whether nobody trains any more."""
        return status.state in (pb.RUN_STATE_COMPLETE, pb.RUN_STATE_DRAINING) or not status.workers

    def _renew(self) -> None:
        self._member.renew()

    def _require_usable(self) -> None:
        self._member.require_open()
        self._member.require_not_replaced()
        if os.getpid() != self._process:
            raise InvalidRequest("this session belongs to the process that opened it: open another one after the fork")


def _samples(samples: int | None, claimed: Sequence[Batch]) -> int:
    return sum(batch.samples for batch in claimed) if samples is None else samples
