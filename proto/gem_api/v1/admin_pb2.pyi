from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateCheckpointResponse(_message.Message):
    __slots__ = ("version", "path", "sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    sha256: bytes
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class ReadCheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ReadCheckpointResponse(_message.Message):
    __slots__ = ("file", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: str
    data: bytes
    def __init__(self, file: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("queue_length",)
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    queue_length: int
    def __init__(self, queue_length: _Optional[int] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[QuarantinedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[QuarantinedWorker, _Mapping]]] = ...) -> None: ...

class QuarantinedWorker(_message.Message):
    __slots__ = ("name", "refusals", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    refusals: int
    why: str
    def __init__(self, name: _Optional[str] = ..., refusals: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class LiftQuarantineRequest(_message.Message):
    __slots__ = ("worker_name",)
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    worker_name: str
    def __init__(self, worker_name: _Optional[str] = ...) -> None: ...

class LiftQuarantineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
