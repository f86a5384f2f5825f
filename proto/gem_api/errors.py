"""Every error of the parameter server, and the conversion between errors and gRPC statuses.

GemError
├── TransportError          the call or its reply got lost: resend the same sequence, with backoff
│   ├── ServerUnavailable   UNAVAILABLE, CANCELLED, UNKNOWN, INTERNAL
│   ├── DeadlineExceeded    DEADLINE_EXCEEDED
│   ├── Draining            UNAVAILABLE          the server is shutting down
│   └── Superseded          ABORTED              another call under the same lease replaced this one
├── LeaseEnded              FAILED_PRECONDITION  register again, drop the gradient
├── SettingsDiffer          FAILED_PRECONDITION  the servers of a run were started with different options: register again later
├── Overloaded              RESOURCE_EXHAUSTED   back off, then try again
├── NotInitialized          FAILED_PRECONDITION  the central variable has no value yet
├── Quarantined             PERMISSION_DENIED    too many rejected commits: an operator must lift the quarantine
├── CheckpointFailed        FAILED_PRECONDITION  nothing was written; the previous checkpoint stands
├── RejectedCommit          the commit is invalid; the central variable is unchanged
│   ├── LayoutMismatch      INVALID_ARGUMENT
│   ├── IncompleteTransfer  INVALID_ARGUMENT
│   ├── NonFiniteGradient   INVALID_ARGUMENT
│   ├── NormOutOfBounds     INVALID_ARGUMENT
│   ├── RuleFailed          INVALID_ARGUMENT     the user's own rule raised an exception
│   └── SequenceGap         FAILED_PRECONDITION
├── Unauthenticated         UNAUTHENTICATED      no token, or an unknown one
├── PermissionDenied        PERMISSION_DENIED    not allowed for this role, or another client's lease or name
└── InvalidRequest          INVALID_ARGUMENT     a missing or invalid field, or a malformed message
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
    """The call or its reply got lost. Resend the same sequence, with backoff."""

    status = grpc.StatusCode.UNAVAILABLE


class ServerUnavailable(TransportError):
    """No server responds at the address, or the connection broke."""


class DeadlineExceeded(TransportError):
    """The server did not respond in time."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Draining(TransportError):
    """The server is shutting down. Resend once it has restarted."""

    code = pb.ERROR_CODE_DRAINING


class Superseded(TransportError):
    """Another call under the same lease replaced this one. It may be an older call that arrived late."""

    code = pb.ERROR_CODE_SUPERSEDED
    status = grpc.StatusCode.ABORTED


class LeaseEnded(GemError):
    """The lease is unknown or has ended. `reason` says why, or is "unknown"."""

    code = pb.ERROR_CODE_LEASE_ENDED
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, reason: str = "unknown") -> None:
        super().__init__(message)
        self.reason = reason

    def metadata(self) -> Metadata:
        return (*super().metadata(), (REASON_KEY, self.reason))


class Overloaded(GemError):
    """The server does not have enough memory for this at present. Try again later."""

    code = pb.ERROR_CODE_OVERLOADED
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class SettingsDiffer(GemError):
    """The servers of the ranges have different hyper-parameters. Register again later: they may be restarted one by one."""

    code = pb.ERROR_CODE_SETTINGS_DIFFER
    status = grpc.StatusCode.FAILED_PRECONDITION


class NotInitialized(GemError):
    """The central variable has no value yet."""

    code = pb.ERROR_CODE_NOT_INITIALIZED
    status = grpc.StatusCode.FAILED_PRECONDITION


class Quarantined(GemError):
    """Too many of the worker's commits in a row were rejected. It can't register until an operator lifts the quarantine."""

    code = pb.ERROR_CODE_QUARANTINED
    status = grpc.StatusCode.PERMISSION_DENIED


class CheckpointFailed(GemError):
    """The checkpoint was not written. The previous one is still valid."""

    code = pb.ERROR_CODE_CHECKPOINT_FAILED
    status = grpc.StatusCode.FAILED_PRECONDITION


class RejectedCommit(GemError):
    """The commit is invalid. The central variable is unchanged, and a resend would be rejected too."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class LayoutMismatch(RejectedCommit):
    """The names, order or shapes of the tensors differ from the run's."""

    code = pb.ERROR_CODE_LAYOUT_MISMATCH


class IncompleteTransfer(RejectedCommit):
    """The chunks do not cover the buffer exactly and in order."""

    code = pb.ERROR_CODE_INCOMPLETE_TRANSFER


class NonFiniteGradient(RejectedCommit):
    """The values hold a NaN, an infinity, or a number so large that it could overflow float32."""

    code = pb.ERROR_CODE_NON_FINITE_GRADIENT


class NormOutOfBounds(RejectedCommit):
    """The gradient's norm is too large, compared with the median of the run's last commits."""

    code = pb.ERROR_CODE_NORM_OUT_OF_BOUNDS


class RuleFailed(RejectedCommit):
    """The user's own update rule raised an exception on the commit."""

    code = pb.ERROR_CODE_RULE_FAILED


class SequenceGap(RejectedCommit):
    """The commit's sequence number is neither the next one nor the last one."""

    code = pb.ERROR_CODE_SEQUENCE_GAP
    status = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(GemError):
    """The server requires a token, and the call has none or an unknown one."""

    code = pb.ERROR_CODE_UNAUTHENTICATED
    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(GemError):
    """The caller's role does not allow this call, or the lease or worker name belongs to another client."""

    code = pb.ERROR_CODE_PERMISSION_DENIED
    status = grpc.StatusCode.PERMISSION_DENIED


class InvalidRequest(GemError):
    """A field is missing or invalid, or the message is malformed."""

    code = pb.ERROR_CODE_INVALID_REQUEST
    status = grpc.StatusCode.INVALID_ARGUMENT


_BY_CODE: dict[int, type[GemError]] = {
    kind.code: kind for kind in vars().copy().values() if isinstance(kind, type) and issubclass(kind, GemError) and kind.code
}
_TYPED = {pb.ErrorCode.Name(kind.code).removeprefix("ERROR_CODE_"): kind for kind in _BY_CODE.values()}

# Statuses that gRPC itself raises: they lack the server's metadata. CANCELLED, UNKNOWN and INTERNAL also occur if a connection
# or a server dies during a call. Resending is safe, because a commit is applied once per sequence.
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
        The error that the metadata names, or else the one for the status. An unknown status becomes an `InvalidRequest`,
        which is never retried.
    """
    values = {key: value.decode("ascii", "replace") if isinstance(value, bytes) else value for key, value in metadata}
    kind = _TYPED.get(values.get(ERROR_KEY, ""))
    if kind is LeaseEnded:
        return LeaseEnded(details, values.get(REASON_KEY, "unknown"))
    if kind is not None:
        return kind(details)
    return _TRANSPORT.get(status, InvalidRequest)(f"{status.name}: {details}")


def from_code(code: int, message: str, reason: str) -> GemError:
    """The typed error of a code, with the `reason` of an ended lease. An unknown code becomes an `InvalidRequest`, which is
    never retried."""
    kind = _BY_CODE.get(code, InvalidRequest)
    return LeaseEnded(message, reason or "unknown") if kind is LeaseEnded else kind(message)
