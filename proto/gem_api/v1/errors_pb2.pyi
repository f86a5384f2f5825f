from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_LEASE_ENDED: _ClassVar[ErrorCode]
    ERROR_CODE_LAYOUT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_INCOMPLETE_TRANSFER: _ClassVar[ErrorCode]
    ERROR_CODE_NON_FINITE_GRADIENT: _ClassVar[ErrorCode]
    ERROR_CODE_SEQUENCE_GAP: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_INITIALIZED: _ClassVar[ErrorCode]
    ERROR_CODE_SUPERSEDED: _ClassVar[ErrorCode]
    ERROR_CODE_CHECKPOINT_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_NORM_OUT_OF_BOUNDS: _ClassVar[ErrorCode]
    ERROR_CODE_QUARANTINED: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_RULE_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_SETTINGS_DIFFER: _ClassVar[ErrorCode]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_LEASE_ENDED: ErrorCode
ERROR_CODE_LAYOUT_MISMATCH: ErrorCode
ERROR_CODE_INCOMPLETE_TRANSFER: ErrorCode
ERROR_CODE_NON_FINITE_GRADIENT: ErrorCode
ERROR_CODE_SEQUENCE_GAP: ErrorCode
ERROR_CODE_INVALID_REQUEST: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_NOT_INITIALIZED: ErrorCode
ERROR_CODE_SUPERSEDED: ErrorCode
ERROR_CODE_CHECKPOINT_FAILED: ErrorCode
ERROR_CODE_NORM_OUT_OF_BOUNDS: ErrorCode
ERROR_CODE_QUARANTINED: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_PERMISSION_DENIED: ErrorCode
ERROR_CODE_RULE_FAILED: ErrorCode
ERROR_CODE_SETTINGS_DIFFER: ErrorCode
