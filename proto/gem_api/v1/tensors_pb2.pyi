from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WireDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_DTYPE_UNSPECIFIED: _ClassVar[WireDtype]
    WIRE_DTYPE_FLOAT32: _ClassVar[WireDtype]
    WIRE_DTYPE_BFLOAT16: _ClassVar[WireDtype]
    WIRE_DTYPE_INT8_BLOCK: _ClassVar[WireDtype]
WIRE_DTYPE_UNSPECIFIED: WireDtype
WIRE_DTYPE_FLOAT32: WireDtype
WIRE_DTYPE_BFLOAT16: WireDtype
WIRE_DTYPE_INT8_BLOCK: WireDtype

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "rate_factor", "no_weight_decay")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    RATE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    NO_WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    rate_factor: float
    no_weight_decay: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., rate_factor: _Optional[float] = ..., no_weight_decay: bool = ...) -> None: ...

class TensorLayout(_message.Message):
    __slots__ = ("tensors", "range_begin", "range_end")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    RANGE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    range_begin: int
    range_end: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., range_begin: _Optional[int] = ..., range_end: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
