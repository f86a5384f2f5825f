"""Makes a session's commits, and settles the batches that they cover."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gem_api.errors import InvalidRequest, LayoutMismatch, RejectedCommit
from gem_api.hyperparameters import decay_of_workers
from gem_api.layout import Vector
from gem_api.update_kind import KINDS, UpdateKind

from gem_client.answer import Answer, Base
from gem_client.arguments import require_figures
from gem_client.run.encoded import EncodedUpdate
from gem_client.run.membership import Membership
from gem_client.run.pending_commit import CommitSpan, PendingCommit
from gem_client.run.shards import Shards


class Commits:
    """Makes commits. The caller sees to it that there is one at a time.

    Attributes:
        handed_out: Identifies the θ that the caller got last.
        progress: The commits in it, each counted by its share of a batch, which the schedule follows.
    """

    def __init__(self, member: Membership, shards: Shards) -> None:
        self._member = member
        self._shards = shards
        self.handed_out, self.progress = Base(0, 0), 0.0

    def hand_out(self) -> Vector:
        """Returns θ as last received, which the next gradient is computed on."""
        self.handed_out, self.progress = self._member.base, self._member.progress
        return self._member.theta

    def prepare(
        self,
        gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike] | EncodedUpdate,
        loss: float | None,
        samples: int | None,
        batches: int | None,
        base: Base | None,
        kind: UpdateKind,
        decay: bool,
        share: float | None,
    ) -> PendingCommit:
        """Returns the commit to make, whose span has begun. Arguments and errors are those of `Session.commit`."""
        require_figures(loss, samples, batches, base, share)
        base = base or self.handed_out  # as it is before a new lease
        update = self._pack(gradient, kind, decay)
        claimed = self._shards.claim(batches)
        if samples is None:
            samples = sum(batch.samples for batch in claimed)
        share = self._shards.share_of(claimed, share)
        span = CommitSpan.begin(self._member.name, self._member.links.transport)
        return PendingCommit(kind, loss, samples, base, update, claimed, share, span=span)

    def make(self, commit: PendingCommit) -> Answer:
        """Has the servers apply a commit, and returns its result. Raises as `Session.commit` does."""
        try:
            answer = self._make(commit)
        except BaseException as error:
            commit.span.failed(error)
            raise
        commit.span.answered(answer)
        return answer

    def _make(self, commit: PendingCommit) -> Answer:
        try:
            result = self._member.commit(commit)
        except RejectedCommit:
            self._shards.committed(commit.batches)  # it would be rejected every time: a caller that continues leaves it out
            self.hand_out()  # of several servers, those that did not reject it have sent a new θ
            raise
        except BaseException:
            self._shards.lost(commit.batches)  # it may have arrived or not: better to train on the batches twice than never
            raise
        theta, version = self.hand_out(), self._member.version
        if result is None:
            self._shards.lost(commit.batches)
            return Answer(theta, version, lost=True)
        self._shards.committed(commit.batches)
        pi_median = result.pi.median if result.HasField("pi") else None
        return Answer(theta, version, result.staleness, pi_median, discarded=result.discarded)

    def _pack(
        self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike] | EncodedUpdate, kind: UpdateKind, decay: bool
    ) -> Vector | EncodedUpdate:
        """Returns the update as it is sent: float32, shape (P,), weight decay included; in shared memory if there is any. One
        that is encoded stays as it is.

        Raises:
            InvalidRequest: `kind` is neither "gradient" nor "delta", or the session has not joined.
            LayoutMismatch: The shape or the dtype is wrong.
        """
        if kind not in KINDS:
            raise InvalidRequest(f"a commit is of kind {' or '.join(KINDS)}, not {kind!r}")
        self._member.rejoin_if_uncertain()  # before an interrupted commit may read the next gradient from shared memory
        if isinstance(gradient, EncodedUpdate):
            return gradient
        packed, own = self._packed(gradient), self._member.gradient
        weight_decay = decay_of_workers(self._member.hyperparameters)
        if kind == "delta" or not decay or not weight_decay:
            return packed
        if packed is not own:  # the caller's array must not change
            np.copyto(own, packed)
        layout = self._member.known_layout
        gradients, thetas = layout.split(own), layout.split(self._member.theta)
        for tensor in layout.tensors:
            if tensor.group.decays:
                gradients[tensor.name] += np.float32(weight_decay) * thetas[tensor.name]
        return own

    def _packed(self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Vector:
        """The update as one float32 array, before weight decay; in shared memory if there is any."""
        own, layout = self._member.gradient, self._member.known_layout
        if isinstance(gradient, Mapping):
            return layout.pack(gradient, own)
        array = np.asarray(gradient)
        if array.shape != (layout.size,):
            raise LayoutMismatch(
                f"the gradient has shape {array.shape}; the model needs ({layout.size},), or a dict of "
                "one array for each tensor"
            )
        if array.dtype.kind != "f":
            raise LayoutMismatch(f"the gradient has dtype {array.dtype}: use a floating-point dtype")
        region = self._member.links.leader.region
        if region is None or own is not region.gradient:
            return np.ascontiguousarray(array, dtype="<f4")
        if array is not own:
            np.copyto(own, array, casting="same_kind")
        return own
