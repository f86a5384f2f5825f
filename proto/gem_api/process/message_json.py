"""The contract's messages as JSON values."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """Converts a message to JSON values, with the names of the .proto file. A field that is not set is None."""
    return {field.name: _json_value(message, field) for field in message.DESCRIPTOR.fields}


def _json_value(message: Message, field: FieldDescriptor) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    values = list(value) if field.is_repeated else [value]
    if field.message_type is not None:
        values = [as_dict(entry) for entry in values]
    elif field.enum_type is not None:
        values = [_name(field.enum_type, entry) for entry in values]
    elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        values = [finite(entry, field.type == field.TYPE_FLOAT) for entry in values]
    return values if field.is_repeated else values[0]


def finite(value: float, single: bool) -> float | None:
    """JSON has no NaN: null. A `float` has no more than six digits that count."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if single else value


def _name(kind: EnumDescriptor, number: int) -> str:
    """The name of an enum's value; its number if it has none here, as a newer server may send."""
    known = kind.values_by_number.get(number)
    return str(number) if known is None else str(known.name)
