"""Carries one commit to the server and its answer back: by reference in shared memory, or in chunks over the network."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gem_api.errors import LayoutMismatch, UnknownRegion
from gem_api.layout import Vector
from gem_api.update_kind import KINDS, UpdateKind
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Encoder, Format

from gem_client.membership import Membership
from gem_client.retry import Retry
from gem_client.transport.connection import Connection


class Carrier:
    """A session's way to commit.

    Args:
        member: The lease, and the buffers that tensors lie in.
        connection: The calls, one attempt each.
        retry: How long to try again.
        form: How gradients go over the network.
    """

    def __init__(self, member: Membership, connection: Connection, retry: Retry, form: Format) -> None:
        self._member = member
        self._connection = connection
        self._retry = retry
        self._form = form
        self._encoder: Encoder | None = None

    def prepare(self) -> None:
        """Loads what the first commit needs: a second, where the wire format converts."""
        if not self._member.region:
            self._form.prepare()

    def pack(self, gradient: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Vector:
        """The gradient as it is carried: float32, shape (P,), in shared memory where there is such. Raises LayoutMismatch."""
        own, layout = self._member.gradient, self._member.known_layout
        if isinstance(gradient, Mapping):
            return layout.pack(gradient, own)
        array = np.asarray(gradient)
        if array.shape != (layout.size,):
            raise LayoutMismatch(f"the gradient has shape {array.shape}, the model's is ({layout.size},)")
        if not np.issubdtype(array.dtype, np.floating):
            raise LayoutMismatch(f"the gradient has dtype {array.dtype}: give floats")
        if not self._member.region:
            return np.ascontiguousarray(array, dtype="<f4")
        if array is not own:
            np.copyto(own, array, casting="same_kind")
        return own

    def carry(self, packed: Vector, kind: UpdateKind, loss: float | None, samples: int, base_version: int) -> pb.CommitResult:
        """Has the server apply a gradient or delta (float32, shape (P,), from `pack`); the member's θ is the answer then.

        Raises:
            RejectedCommit: The server refuses it for what it is.
            LeaseEnded: The lease has ended.
            TransportError: The server could not be reached for as long as `retry` allows.
        """
        registration = self._member.registration
        header = pb.CommitHeader(
            lease_id=registration.lease_id,
            sequence=self._member.sequence + 1,
            base_version=base_version,
            wire_dtype=self._form.dtype,
            theta_dtype=self._member.theta_format.dtype,
            layout_fingerprint=registration.layout_fingerprint,
            loss=None if loss is None else float(loss),
            sample_count=samples,
            update_kind=KINDS[kind],
        )
        return self._retry.call(lambda: self._try(header, packed), self._member.report)

    def _try(self, header: pb.CommitHeader, packed: Vector) -> pb.CommitResult:
        """Once; a server that was restarted in between shares memory anew, or gets chunks."""
        member, shared_again = self._member, False
        while member.region:
            header.region = member.region
            try:
                return self._connection.commit([_opening(header)], None)
            except UnknownRegion:
                member.region = b""
                if not shared_again:
                    member.share_memory()
                shared_again = True
        header.region = b""
        self._encoder = self._encoder or self._form.encoder(packed.size)
        theta = member.theta_format.assembly(member.theta)
        result = self._connection.commit(self._encoder.frames(packed, _opening(header)), theta)
        self._encoder.applied()
        return result


def _opening(header: pb.CommitHeader) -> bytes:
    return pb.CommitRequest(header=header).SerializeToString()
