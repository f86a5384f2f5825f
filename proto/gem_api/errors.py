"""Every failure of the parameter server, one tree, and the one seam between it and gRPC statuses.

GemError
├── TransportError          the call did not get through: resend the same sequence, with backoff
│   ├── ServerUnavailable   UNAVAILABLE, CANCELLED, UNKNOWN, INTERNAL
│   ├── DeadlineExceeded    DEADLINE_EXCEEDED
│   ├── Draining            UNAVAILABLE          the server is shutting down
│   └── Superseded          ABORTED              another call under the same lease took over
├── LeaseEnded              FAILED_PRECONDITION  register again, drop the gradient
├── Overloaded              RESOURCE_EXHAUSTED   back off, then try again
├── NotInitialized          FAILED_PRECONDITION  the central variable has no value yet
├── UnknownRegion           FAILED_PRECONDITION  share memory anew, or send chunks
├── Quarantined             PERMISSION_DENIED    refused too often: an operator has to let the worker in again
├── CheckpointFailed        FAILED_PRECONDITION  nothing was written; the previous checkpoint stands
├── RejectedCommit          the caller's fault; the central variable is untouched
│   ├── LayoutMismatch      INVALID_ARGUMENT
│   ├── IncompleteTransfer  INVALID_ARGUMENT
│   ├── NonFiniteGradient   INVALID_ARGUMENT
│   ├── NormOutOfBounds     INVALID_ARGUMENT
│   ├── RuleFailed          INVALID_ARGUMENT     the run's rule raised an exception on it
│   └── SequenceGap         FAILED_PRECONDITION
├── Unauthenticated         UNAUTHENTICATED      no token, or none that the server knows
├── PermissionDenied        PERMISSION_DENIED    the caller's role may not do this, or the lease is another's
└── InvalidRequest          INVALID_ARGUMENT     a field out of its range, a message that does not parse
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import grpc

from gem_api.v1 import errors_pb2 as pb

ERROR_KEY = "gem-error"
REASON_KEY = "gem-lease-end-reason"
Metadata = tuple[tuple[str, str], ...]


class GemError(Exception):
    """Base of every error of the parameter server."""

    code: ClassVar[pb.ErrorCode] = pb.ERROR_CODE_UNSPECIFIED
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def metadata(self) -> Metadata:
        """The trailing metadata that names this error on the wire."""
        return ((ERROR_KEY, pb.ErrorCode.Name(self.code).removeprefix("ERROR_CODE_")),)


class TransportError(GemError):
    """The call did not get through, or its answer did not: resend the same sequence, with backoff."""

    status = grpc.StatusCode.UNAVAILABLE


class ServerUnavailable(TransportError):
    """No server answers at the address, or the connection broke."""


class DeadlineExceeded(TransportError):
    """The server did not answer in time."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Draining(TransportError):
    """The server is shutting down; resend once one answers again."""

    code = pb.ERROR_CODE_DRAINING


class Superseded(TransportError):
    """Another call under the same lease took this one's place; it may have been an older one that arrived late."""

    code = pb.ERROR_CODE_SUPERSEDED
    status = grpc.StatusCode.ABORTED


class LeaseEnded(GemError):
    """The lease is unknown or has ended; `reason` says why where that is known, else it is "unknown"."""

    code = pb.ERROR_CODE_LEASE_ENDED
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, reason: str = "unknown") -> None:
        super().__init__(message)
        self.reason = reason

    def metadata(self) -> Metadata:
        return (*super().metadata(), (REASON_KEY, self.reason))


class Overloaded(GemError):
    """The server has no room for this now."""

    code = pb.ERROR_CODE_OVERLOADED
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotInitialized(GemError):
    """The central variable has no value yet."""

    code = pb.ERROR_CODE_NOT_INITIALIZED
    status = grpc.StatusCode.FAILED_PRECONDITION


class UnknownRegion(GemError):
    """The server does not map the region of shared memory that a commit names: share memory anew, or send chunks."""

    code = pb.ERROR_CODE_UNKNOWN_REGION
    status = grpc.StatusCode.FAILED_PRECONDITION


class Quarantined(GemError):
    """Too many of the worker's commits in a row were refused: it stays out until an operator lets it in again."""

    code = pb.ERROR_CODE_QUARANTINED
    status = grpc.StatusCode.PERMISSION_DENIED


class CheckpointFailed(GemError):
    """The checkpoint was not written; the previous one stands."""

    code = pb.ERROR_CODE_CHECKPOINT_FAILED
    status = grpc.StatusCode.FAILED_PRECONDITION


class RejectedCommit(GemError):
    """The commit was refused for what it is; the central variable is untouched and a resend will be refused too."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class LayoutMismatch(RejectedCommit):
    """The tensors are not those of the run."""

    code = pb.ERROR_CODE_LAYOUT_MISMATCH


class IncompleteTransfer(RejectedCommit):
    """The chunks do not cover the buffer exactly and in order."""

    code = pb.ERROR_CODE_INCOMPLETE_TRANSFER


class NonFiniteGradient(RejectedCommit):
    """The values hold a NaN, an infinity, or a magnitude that could overflow float32."""

    code = pb.ERROR_CODE_NON_FINITE_GRADIENT


class NormOutOfBounds(RejectedCommit):
    """The gradient's norm is too many times what the run's commits had lately."""

    code = pb.ERROR_CODE_NORM_OUT_OF_BOUNDS


class RuleFailed(RejectedCommit):
    """The run's update rule, a user's own, raised an exception on the commit."""

    code = pb.ERROR_CODE_RULE_FAILED


class SequenceGap(RejectedCommit):
    """The commit's sequence is neither the next one nor the last one."""

    code = pb.ERROR_CODE_SEQUENCE_GAP
    status = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(GemError):
    """The server asks for a credential: the call carries none, or none that it knows."""

    code = pb.ERROR_CODE_UNAUTHENTICATED
    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(GemError):
    """The caller is known, but may not do this: not in its role, or not under another's lease or name."""

    code = pb.ERROR_CODE_PERMISSION_DENIED
    status = grpc.StatusCode.PERMISSION_DENIED


class InvalidRequest(GemError):
    """A field is missing or out of its range, or a message does not parse."""

    code = pb.ERROR_CODE_INVALID_REQUEST
    status = grpc.StatusCode.INVALID_ARGUMENT


_TYPED: dict[str, type[GemError]] = {
    pb.ErrorCode.Name(kind.code).removeprefix("ERROR_CODE_"): kind
    for kind in (
        Draining,
        LeaseEnded,
        Overloaded,
        NotInitialized,
        Superseded,
        UnknownRegion,
        Quarantined,
        CheckpointFailed,
        LayoutMismatch,
        IncompleteTransfer,
        NonFiniteGradient,
        NormOutOfBounds,
        RuleFailed,
        SequenceGap,
        Unauthenticated,
        PermissionDenied,
        InvalidRequest,
    )
}

# Statuses that gRPC itself raises, without our metadata. CANCELLED, UNKNOWN and INTERNAL also come from a connection or a
# server that died in mid-call; resending is safe because a commit is applied once per sequence.
_TRANSPORT: dict[grpc.StatusCode, type[GemError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.CANCELLED: ServerUnavailable,
    grpc.StatusCode.UNKNOWN: ServerUnavailable,
    grpc.StatusCode.INTERNAL: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def from_status(status: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, str | bytes]]) -> GemError:
    """The typed error for a failed call.

    Args:
        status: The call's gRPC status; not OK.
        details: The status message.
        metadata: The call's trailing metadata.

    Returns:
        The error that the metadata names; else the one that the bare status stands for; else an `InvalidRequest`, so
        that an unknown status is never retried.
    """
    values = {key: value.decode("ascii", "replace") if isinstance(value, bytes) else value for key, value in metadata}
    kind = _TYPED.get(values.get(ERROR_KEY, ""))
    if kind is LeaseEnded:
        return LeaseEnded(details, values.get(REASON_KEY, "unknown"))
    if kind is not None:
        return kind(details)
    return _TRANSPORT.get(status, InvalidRequest)(f"{status.name}: {details}")
