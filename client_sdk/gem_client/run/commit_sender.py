"""Sends one commit to the servers and receives the new θ: through shared memory, a lane's socket, or gRPC."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gem_api.errors import InvalidRequest, LayoutMismatch, LeaseEnded, RejectedCommit
from gem_api.hyperparameters import decay_of_workers
from gem_api.layout import Layout, Vector
from gem_api.update_kind import KINDS, UpdateKind
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Format

from gem_client.answer import Base
from gem_client.retry import Retry
from gem_client.run.link import Link
from gem_client.run.membership import Membership


class CommitSender:
    """Sends the commits of one session.

    Args:
        member: The session's membership: its lease, its buffers and its links to the servers.
        retry: How long to retry.
        gradient_format: The format of gradients on the network.
    """

    def __init__(self, member: Membership, retry: Retry, gradient_format: Format) -> None:
        self._member = member
        self._retry = retry
        self._gradient_format = gradient_format

    def prepare(self) -> None:
        """Compiles the conversion to the wire format ahead of the first commit, which takes about a second."""
        if not self._member.links.share_memory:
            self._gradient_format.prepare()

    def pack(self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike], kind: UpdateKind, decay: bool) -> Vector:
        """Returns the update as it is sent: float32, shape (P,), weight decay included; in shared memory if there is any.

        Raises:
            InvalidRequest: `kind` is neither "gradient" nor "delta", or the session has not joined.
            LayoutMismatch: The shape or the dtype is wrong.
        """
        if kind not in KINDS:
            raise InvalidRequest(f"a commit is of kind {' or '.join(KINDS)}, not {kind!r}")
        self._member.settle_doubt()  # before an interrupted commit may read the next gradient from shared memory
        packed = self._pack(gradient)
        weight_decay = decay_of_workers(self._member.hyperparameters)
        if kind == "delta" or not decay or not weight_decay:
            return packed
        # Into the session's own buffer: the caller's array must not change.
        own = self._member.gradient
        if packed is not own:
            np.copyto(own, packed)
        _add_decay(self._member.known_layout, own, self._member.theta, np.float32(weight_decay))
        return own

    def send(self, packed: Vector, kind: UpdateKind, loss: float | None, samples: int, base: Base) -> pb.CommitResult | None:
        """Has all servers apply an update (float32, shape (P,), from `pack`); the member's `theta` then holds the new θ.

        Returns the result of the server that leads; None if the update was dropped because its lease had ended. The member then
        holds a new lease and a fresh θ.

        Raises:
            InvalidRequest: `base` is not that of a session with as many servers.
            RejectedCommit: A server rejects its part of the update for its content.
            TransportError: A server could not be reached for as long as `retry` allows.
        """
        member = self._member
        if base.generation != member.generation:
            return None
        versions = (base.version, *base.peer_versions)
        if len(versions) != 1 + len(member.links.peers):
            raise InvalidRequest(f"{base} has no version for each server: take it from the session's property `base`")
        member.commit_begins()

        def send_part(link: Link) -> pb.CommitResult:
            header = self._header(link, kind, loss, samples, versions[link.part.index])
            try:
                result = link.retry(self._retry, lambda: self._try(link, header, link.view(packed)), member.report)
            except RejectedCommit:
                member.part_rejected(link, header.sequence)
                raise
            member.part_applied(link, result)
            return result

        try:
            result, *_ = member.links.at_once(send_part)
        except RejectedCommit:
            member.commit_rejected()
            raise
        except LeaseEnded as ended:
            member.enter_again(ended)
            return None
        member.commit_applied(result)
        return result

    def _header(self, link: Link, kind: UpdateKind, loss: float | None, samples: int, base_version: int) -> pb.CommitHeader:
        registration = link.registration
        assert registration is not None
        return pb.CommitHeader(
            lease_id=registration.lease_id,
            sequence=self._member.sequence + 1,
            base_version=base_version,
            wire_dtype=self._gradient_format.dtype,
            theta_dtype=self._member.theta_format.dtype,
            layout_fingerprint=registration.layout_fingerprint,
            loss=None if loss is None else float(loss),
            sample_count=samples,
            update_kind=KINDS[kind],
        )

    def _pack(self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Vector:
        own, layout = self._member.gradient, self._member.known_layout
        if isinstance(gradient, Mapping):
            return layout.pack(gradient, own)
        array = np.asarray(gradient)
        if array.shape != (layout.size,):
            raise LayoutMismatch(f"the gradient has shape {array.shape}; the model needs ({layout.size},)")
        if array.dtype.kind != "f":
            raise LayoutMismatch(f"the gradient has dtype {array.dtype}: use a floating-point dtype")
        if not self._member.lies_in_region:
            return np.ascontiguousarray(array, dtype="<f4")
        if array is not own:
            np.copyto(own, array, casting="same_kind")
        return own

    def _try(self, link: Link, header: pb.CommitHeader, packed: Vector) -> pb.CommitResult:
        """Makes one attempt with one server: through shared memory, else through a lane's socket, else over gRPC.

        `packed` is its part of the update (float32, shape (its size,)). Its part of the new θ comes into the member's `theta`.
        """
        member, connection = self._member, link.connection
        if connection.lane_broke:
            member.open_lane(link)
        theta, region = link.view(member.theta), link.region
        if region is not None:
            if packed is not region.gradient:  # a part, or the memory was replaced after `pack`
                np.copyto(region.gradient, packed)
            result = connection.commit_on_lane(lambda lane: lane.exchange_in_memory(header))
            if theta is not region.theta:
                np.copyto(theta, region.theta)
            return result
        encoder = link.encoder(self._gradient_format, packed.size)
        if connection.lane is not None:
            nbytes, form = self._gradient_format.nbytes(packed.size), member.theta_format
            result = connection.commit_on_lane(lambda lane: lane.exchange(header, nbytes, encoder.pieces(packed), theta, form))
        else:
            result = connection.commit(encoder.frames(packed, _opening(header)), member.theta_format.assembly(theta))
        encoder.applied()
        return result


def _opening(header: pb.CommitHeader) -> bytes:
    return pb.CommitRequest(header=header).SerializeToString()


def _add_decay(layout: Layout, gradient: Vector, theta: Vector, decay: np.float32) -> None:
    """Adds decay·θ to a packed gradient, except to tensors without weight decay."""
    thetas = layout.split(theta)
    for tensor, into in zip(layout.tensors, layout.split(gradient).values(), strict=True):
        if tensor.decays:
            into += decay * thetas[tensor.name]
