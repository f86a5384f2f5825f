from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateCheckpointRequest(_message.Message):
    __slots__ = ("cut",)
    CUT_FIELD_NUMBER: _ClassVar[int]
    cut: Cut
    def __init__(self, cut: _Optional[_Union[Cut, _Mapping]] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("sequences",)
    class SequencesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.ScalarMap[str, int]
    def __init__(self, sequences: _Optional[_Mapping[str, int]] = ...) -> None: ...

class BeginCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginCheckpointResponse(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: Cut
    def __init__(self, taken: _Optional[_Union[Cut, _Mapping]] = ...) -> None: ...

class WriteManifestRequest(_message.Message):
    __slots__ = ("ranges", "cut", "complete")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[RangeCheckpoint]
    cut: Cut
    complete: bool
    def __init__(self, ranges: _Optional[_Iterable[_Union[RangeCheckpoint, _Mapping]]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., complete: bool = ...) -> None: ...

class RangeCheckpoint(_message.Message):
    __slots__ = ("address", "path", "version", "sha256")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    address: str
    path: str
    version: int
    sha256: bytes
    def __init__(self, address: _Optional[str] = ..., path: _Optional[str] = ..., version: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class WriteManifestResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class CreateCheckpointResponse(_message.Message):
    __slots__ = ("version", "path", "sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    sha256: bytes
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

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
