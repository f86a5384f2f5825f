"""A worker's session with the server: join a run, pull θ, commit gradients. Every call is safe to repeat."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, Future, wait
from types import MappingProxyType, TracebackType
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from gem_api.errors import GemError, InvalidRequest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Group, Layout, Vector
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.process.allocator import tune_allocator
from gem_api.schedule import rate
from gem_api.update_kind import UpdateKind, kind_of
from gem_api.v1 import training_pb2 as pb

from gem_client.answer import Answer, Base
from gem_client.arguments import as_choice, require_batches_per_step, require_evaluation
from gem_client.card import card
from gem_client.plain_errors import plain_errors
from gem_client.run.commits import Commits
from gem_client.run.host_buffers import HostBuffers
from gem_client.run.link import Caller
from gem_client.run.membership import Membership
from gem_client.run.shards import Shards
from gem_client.transport.side_thread import SideThread

log = logging.getLogger("gem_client")


class Session:
    """One worker in a run; `connect` makes it. Use it from one thread, as a context manager: on exit the worker leaves.

    If several servers hold θ together, the session finds them all through the one that it connects to, and a call ends when
    all of them have answered.

    While the server is unreachable, a call is retried until `retry` gives up; then it raises TransportError. The server applies
    each commit once, however often it is sent. If the lease ends (the worker was silent for too long, or the server resumed
    from an older checkpoint), the session registers again and drops the current gradient.

    A notebook shows a session as a card with the state of the run and its curves.

    Attributes:
        name: The worker's name.
        read_version: Version of the θ that `read` returned last, 0 before; with several servers, that of range 0.
        host_buffers: The session's buffers, for `Optimizer`.
    """

    def __init__(self, address: str, caller: Caller) -> None:
        tune_allocator()
        self.name = caller.name
        self.read_version = 0
        self._pull_only_reads = False
        # For work while the caller computes: a commit under way, shards. Only one task at a time uses the connection.
        self._lock = threading.RLock()
        self._side = SideThread("gem-session-side", self._lock)
        self._under_way: Future[Answer] | None = None
        self._caller = caller
        self._member = Membership(address, caller)
        self.host_buffers = HostBuffers(self._member, self._lock)
        self._shards = Shards(self._member, self._side, self._wait_for_commit)
        self._commits = Commits(self._member, self._shards)

    # -- what the caller may read

    @property
    def joined(self) -> bool:
        """Whether the worker is in the run: after `join`, and before `pull_final`."""
        return self._member.joined

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The run's hyperparameters. Raises InvalidRequest before `join`."""
        return self._member.hyperparameters

    @property
    def update_kind(self) -> UpdateKind:
        """The kind of this run's commits: "gradient" or "delta" (see `commit`). Raises InvalidRequest before `join`.

        A loop that asks may have an optimizer of its own: the log says once if plain SGD on the server makes the steps."""
        kind = kind_of(self._member.registration.update_kind)
        if kind == "gradient" and not self._pull_only_reads:
            self._member.warn_of_gradients()
        return kind

    @property
    def learning_rate(self) -> float:
        """η_t of the θ handed out last, which is the rate of local steps. Raises InvalidRequest before `join`."""
        return rate(self.hyperparameters, self.progress)

    @property
    def progress(self) -> float:
        """The commits in the θ handed out last, each counted by its share of a batch; with several servers, those of range 0.
        The schedule of the learning rate follows it."""
        return self._commits.progress

    @property
    def batch_share(self) -> float:
        """The share of a whole batch that the next gradient should have, so that it takes about as long as the fastest
        worker's: as of the last commit. 1 before it, with a new lease, with local steps or deltas, and if `smallest_share`
        is 1. `shards` follow it. A loop that cuts its own batches to it tells `commit` their `share`; others need not ask.
        Raises InvalidRequest before `join`."""
        return self._shards.batch_share

    @property
    def layout(self) -> Layout:
        """The names and shapes of all of the run's tensors. Raises InvalidRequest before the first `join` or `pull`."""
        return self._member.known_layout

    @property
    def run_id(self) -> str:
        """The run's id. Raises InvalidRequest before `join`."""
        return self._member.registration.run_id

    @property
    def theta(self) -> Vector:
        """θ as last received: float32, shape (P,), the session's own buffer. A new lease, or new shared memory, replaces it."""
        return self._member.theta

    @property
    def gradient(self) -> Vector:
        """A buffer for the next gradient: float32, shape (P,). With memory shared with a single server, a gradient written here
        is committed without a copy. A new lease, or new shared memory, replaces the buffer."""
        return self._member.gradient

    @property
    def shares_memory(self) -> bool:
        """Whether commits go through memory shared with the server, or with all of several, instead of the network."""
        return self._member.links.share_memory

    @property
    def transport(self) -> str:
        """The transport of commits at present: "memory", "tcp", "tls" or "grpc". If it differs between several servers,
        those that occur, such as "memory+tcp"."""
        return self._member.links.transport

    @property
    def version(self) -> int:
        """Version of `theta`; with several servers, that of range 0."""
        return self._member.version

    @property
    @plain_errors
    def is_first(self) -> bool:
        """Whether this worker is the one to save, report and write files for all: the oldest in the run. If it leaves, the next
        one is. After `load_final` or `pull_final` exactly one worker still is. Asks the server: ask once an epoch, not at each
        step.

        Raises:
            ServerUnavailable: The server could not be reached for the time in `retry`.
        """
        return self._member.is_first

    @property
    def base(self) -> Base:
        """Identifies the θ handed out last, for `commit`."""
        return self._commits.handed_out

    @property
    def steps_done(self) -> int:
        """Number of commits applied under this worker's name in this run."""
        return self._member.steps_done

    @property
    def generation(self) -> int:
        """Number of leases that the session has held. It grows by one whenever the session registers again."""
        return self._member.generation

    @property
    def stalled(self) -> bool:
        """Whether the server has ended the lease because this worker no longer trains, and the worker has asked for nothing
        since. Another thread may look at it."""
        stalled = self._caller.standing.stalled
        return bool(stalled) and stalled == self._member.lease_id

    @property
    def batches_per_commit(self) -> int:
        """Number of batches that one commit covers: those of one step, times the run's local steps. Raises InvalidRequest
        before `join`."""
        return self._shards.batches_per_commit

    @property
    def skipped(self) -> int:
        """Number of batches that `skip` has taken out of the run."""
        return self._shards.skipped

    # -- joining, reading, committing

    @plain_errors
    def join(
        self,
        parameters: Mapping[str, npt.ArrayLike] | Iterable[tuple[str, npt.ArrayLike]],
        *,
        groups: Mapping[str, Group] = MappingProxyType({}),
        optimizer: str | OptimizerChoice | None = None,
        overlap: bool = False,
        batches_per_step: int = 1,
        pull_only_reads: bool = False,
        frozen: bytes = b"",
    ) -> Vector:
        """Joins the run with a model and returns θ: float32, shape (P,).

        Args:
            parameters: The model's tensors: a mapping from name to array, or (name, array) pairs. All workers must give the
                same names and shapes in the same order. The server asks one worker for θ's first value and takes it from these
                arrays; for the others only names and shapes count.
            groups: The learning-rate factor and the weight decay of tensors that differ from the others, by name. All workers
                must give the same.
            optimizer: "worker" if the worker has an optimizer of its own, and commits the deltas of its steps; or the optimizer
                that it brings for the server to keep, as an `OptimizerChoice`. A server that was started without `--optimizer`
                takes what the first worker brings. None: the worker commits what the run asks for (`update_kind`).
            overlap: Whether the worker will compute while a commit is under way (`begin_commit`). The server then keeps one
                more snapshot for it: P·4 bytes.
            batches_per_step: Number of batches that each gradient is computed on; more than 1 if gradients are accumulated.
            pull_only_reads: Whether `pull` shall do the same as `read`; for an optimizer that takes θ by `take_theta`.
            frozen: 32 bytes that identify the values of the model's parameters that are not trained, such as their SHA-256;
                empty if there are none. They must be the same for all workers.

        Raises:
            InvalidRequest: Two parameters have the same name, the run has another optimizer, `batches_per_step` is not a whole
                number above 0, or the session has joined already.
            LayoutMismatch: The run has a model with other names or shapes, or with other frozen parameters.
            Overloaded: The server had no room for another worker for as long as `retry` allows.
            NonFiniteGradient: θ's first value holds a NaN or an infinity.
            Quarantined: The server has rejected too many gradients of a worker with this name.
        """
        self._member.require_usable()
        require_batches_per_step(batches_per_step)
        choice = as_choice(optimizer)
        self._member.require_not_joined()
        pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
        named = [(name, np.asarray(value)) for name, value in pairs]
        layout, arrays = Layout.of(((name, array.shape) for name, array in named), groups), dict(named)
        with self._lock:
            self._member.prepare(layout, overlap, choice, frozen)
            layout.pack(arrays, self._member.theta)
            try:
                self._member.enter()
            except BaseException:
                self._member.leave()  # other workers must not wait for this one, and the caller may try again
                self._member.forget()
                raise
            self._pull_only_reads, self._shards.batches_per_step = pull_only_reads, batches_per_step
            return self._commits.hand_out()

    @plain_errors
    def pull(self) -> Vector:
        """Receives the current θ, to compute the next gradient on: float32, shape (P,), the session's own buffer.

        The server computes the next commit's staleness, and GEM its π, from this θ. To only look at θ, use `read`. `pull` also
        works before `join`, without a lease. If a `gem_client.torch.Optimizer` uses the session, `pull` does the same as
        `read`, because the optimizer takes θ itself.
        """
        if self._pull_only_reads:
            return self.read()
        self._member.require_usable()
        if self._member.joined:
            return self.take_theta()
        with self._lock:
            return self._member.pull_without_lease()

    @plain_errors
    def read(self, average: bool = False) -> Vector:
        """Receives the current θ, for example to evaluate it: float32, shape (P,), a new buffer that the caller owns.

        The next commit is still based on the θ handed out last. Waits for a commit under way.

        Args:
            average: Whether to receive the average of θ that the run keeps (`gem-server --average`) instead.

        Raises:
            InvalidRequest: The run keeps no average.
            LayoutMismatch: The server has begun a run with another model.
        """
        self._member.require_usable()
        with self._lock:
            theta, self.read_version = self._member.read(average)
            return theta

    @plain_errors
    def report_evaluation(self, loss: float, accuracy: float | None = None, version: int | None = None) -> None:
        """Reports how good a θ is on held-out data: for the live page, the metrics and `gem-ctl report`.

        Args:
            loss: The loss.
            accuracy: The fraction of correct predictions, 0 to 1, if there is one.
            version: The version of that θ: `read_version` for one from `read`. The default is that of `theta`, received last.

        Raises:
            InvalidRequest: An argument is not such a number.
        """
        self._caller.require_open()
        require_evaluation(loss, accuracy, version)
        report = pb.ReportEvaluationRequest(version=self.version if version is None else version, loss=loss, accuracy=accuracy)
        leader = self._member.links.leader
        with self._lock:
            leader.call(lambda: leader.connection.report_evaluation(report))

    def take_theta(self) -> Vector:
        """Pulls under the lease even if `pull` only reads: for `Optimizer`."""
        self._member.require_usable()
        with self._lock:
            self._member.pull_under_lease()
            return self._commits.hand_out()

    @plain_errors
    def commit(
        self,
        gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        loss: float | None = None,
        samples: int | None = None,
        batches: int | None = None,
        base: Base | None = None,
        kind: UpdateKind = "gradient",
        decay: bool = True,
        share: float | None = None,
    ) -> Answer:
        """Sends a gradient (or a delta) to be applied, and returns the new θ. With an optimizer on the server that is a point
        ahead of θ, for the next gradient. Takes one round trip.

        If the run has weight decay, weight_decay·θ is added to a gradient first, with the θ handed out last. This changes a
        gradient in the session's own buffer in place. A delta stays as it is: its local steps contain the decay already.

        Args:
            gradient: The gradient: float, shape (P,), in the layout's order; or a mapping from name to array.
            loss: Training loss of the batch, which the server records.
            samples: Number of samples that the gradient was computed on. The default is the size of the batches that the
                commit covers.
            batches: Number of this session's batches that the commit covers. The default is the `batches_per_step` given to
                `join`. If fewer were handed out since the last commit, it covers those.
            base: The θ that the gradient was computed on, from the property `base`. The default is the θ handed out last.
            kind: "gradient", or "delta" (the parameters after local steps minus those before). The run takes only one of the
                two: see `update_kind`.
            decay: Whether to add the weight decay to a gradient. Pass False if the gradient contains it already.
            share: The share of a whole batch that the gradient was computed on, above 0 and at most 1. It counts by that if
                the run's `smallest_share` is below 1. The default is that of the batches that the commit covers, or else 1.

        Returns:
            The new θ and what the rule made of the gradient.

        Raises:
            InvalidRequest: The run does not take commits of this kind, or `loss`, `samples`, `batches` or `base` is not what it
                should be.
            LayoutMismatch: The shape of the gradient is not the model's.
            NonFiniteGradient: The gradient holds a NaN, an infinity or a far too large value. θ is unchanged.
            NormOutOfBounds: The gradient's norm exceeds the server's bound. θ is unchanged.
            Quarantined: The server has rejected too many gradients in a row. An operator must lift the quarantine.
        """
        self._member.require_usable()
        with self._lock:
            return self._commits.make(self._commits.prepare(gradient, loss, samples, batches, base, kind, decay, share))

    @plain_errors
    def begin_commit(
        self,
        gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        loss: float | None = None,
        samples: int | None = None,
        batches: int | None = None,
        base: Base | None = None,
        kind: UpdateKind = "gradient",
        decay: bool = True,
        share: float | None = None,
    ) -> None:
        """Starts a commit and returns at once; `finish_commit` returns its result. Until then, leave `gradient` and `theta`
        alone. The arguments are those of `commit`.

        Weight decay uses the θ handed out last. To use another one, add the decay yourself and pass `decay=False`.

        Raises:
            InvalidRequest: Another commit is under way, or the session has not joined with `overlap=True`.
            LayoutMismatch: The shape of the gradient is not the model's.
        """
        self._member.require_usable()
        if self._under_way is not None or not self._member.request.overlap:
            raise InvalidRequest("one commit at a time can be under way, in a session that joined with overlap=True")
        with self._lock:
            commit = self._commits.prepare(gradient, loss, samples, batches, base, kind, decay, share)
        self._under_way = self._side.submit(self._commits.make, commit)
        self._under_way.add_done_callback(lambda done: commit.span.failed(CancelledError()) if done.cancelled() else None)

    @plain_errors
    def finish_commit(self) -> Answer | None:
        """Waits for the commit under way and returns its result, or raises as `commit` does. Returns None if there is none."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way is not None else None

    def shards(self, samples: int, batch_size: int | None = None, fingerprint: bytes = b"") -> Shards:
        """Returns an iterator over batches of sample indices. Each commit then completes the batch that it was computed on.

        Args:
            samples: Number of samples in the training set.
            batch_size: Number of indices per batch. The default is the run's batch size.
            fingerprint: Up to 32 bytes that identify the samples and their order, which must be the same for all workers;
                empty if they are not known.

        Raises:
            InvalidRequest: The session has made such an iterator already, or has not joined.
        """
        return self._shards.open(samples, batch_size, fingerprint)

    def skip(self, batches: int = 1) -> None:
        """Leaves the last `batches` batches out of this epoch. Otherwise, an uncommitted batch comes again.

        Raises:
            InvalidRequest: The loop has fewer batches than that without a commit.
        """
        self._member.require_usable()
        self._shards.skip(batches)

    @plain_errors
    def pull_final(self, average: bool = False) -> Vector:
        """Leaves the run, waits until it is over, and returns its final θ: float32, shape (P,), the session's own buffer.

        A run is over if every sample of every epoch was trained on, if no worker is left, or if the server drains. Every
        worker that calls this method gets the same θ.

        Args:
            average: Whether to return the final average of θ that the run keeps (`gem-server --average`) instead.

        Raises:
            InvalidRequest: The run keeps no average. The worker has not left then.
            RejectedCommit: The server rejected the commit that was under way.
        """
        self._member.require_usable()
        if average:
            self._member.require_average()
        self.finish_commit()
        self._shards.wait_for_reports()
        with self._lock:
            self._member.links.drop_streams()
            self._member.leave()
            self._member.forget(for_good=True)
            self._member.wait_until_run_is_over()
            return self._member.pull_without_lease(average)

    def close(self) -> None:
        """Waits for a commit under way, leaves the run and closes the connection. Does nothing if the session is closed."""
        if not self._caller.closed and not self._member.is_copy:
            try:
                self.finish_commit()
            except GemError as error:
                log.warning("%s: the last commit failed: %s", self.name, error)
            self._shards.wait_for_reports()
            self._member.warn_if_idle()
        self._end()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a session can't be copied or pickled: open another one with gem_client.connect")

    def _repr_html_(self) -> str:
        """The card that a notebook shows. It may be read at any time: no call of the session waits for it, or it for them."""
        return card(self._member)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._end()  # cancels calls in progress: no caller waits for their results

    def _end(self) -> None:
        if self._caller.closed:
            return
        self._caller.closed = True  # a call that is being retried raises InvalidRequest instead of trying again
        if self._member.is_copy:
            return
        self._side.close()
        if self.skipped:
            log.info("%s: %d batches were skipped", self.name, self.skipped)
        self._member.end()

    # -- for `Optimizer`

    @property
    def batches_in_hand(self) -> int:
        """Batches that the loop has and that no commit and no skip covers yet; 0 if that is not known."""
        return self._shards.in_hand

    def add_to_window(self, batches: int) -> None:
        """The loop made a local step with its last `batches` batches: the next commit covers them too."""
        self._shards.add_to_window(batches)

    def _wait_for_commit(self) -> None:
        """Waits for the commit under way, if there is one; `finish_commit` still returns its result."""
        if self._under_way is not None:
            wait([self._under_way])
