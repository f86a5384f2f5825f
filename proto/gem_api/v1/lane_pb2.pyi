from gem_api.v1 import errors_pb2 as _errors_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaneHello(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class LaneWelcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaneRenewal(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaneError(_message.Message):
    __slots__ = ("code", "message", "lease_end_reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LEASE_END_REASON_FIELD_NUMBER: _ClassVar[int]
    code: _errors_pb2.ErrorCode
    message: str
    lease_end_reason: str
    def __init__(self, code: _Optional[_Union[_errors_pb2.ErrorCode, str]] = ..., message: _Optional[str] = ..., lease_end_reason: _Optional[str] = ...) -> None: ...
