"""The numbers of the contract: one that was given out keeps its meaning or is reserved. `contract_numbers.txt` has them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gem_api.v1 import admin_pb2, errors_pb2, lane_pb2, tensors_pb2, training_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto

LIST = Path(__file__).with_name("contract_numbers.txt")
FILES = (admin_pb2, errors_pb2, lane_pb2, tensors_pb2, training_pb2)


def of_file(descriptor: Any) -> Iterator[str]:
    """A line for each number: the message or enum, the number, and what it means."""
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    yield from of_enums("", file.enum_type)
    for message in file.message_type:
        yield from of_message("", message)


def of_message(scope: str, message: DescriptorProto) -> Iterator[str]:
    scope += message.name
    for field in message.field:
        label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
        kind = field.type_name.removeprefix(".gem_api.v1.") or FieldDescriptorProto.Type.Name(field.type)[5:].lower()
        yield f"{scope} {field.number} {label} {kind} {field.name}"
    for reserved in message.reserved_range:
        yield from (f"{scope} {number} reserved" for number in range(reserved.start, reserved.end))
    yield from of_enums(f"{scope}.", message.enum_type)
    for inner in message.nested_type:
        yield from of_message(f"{scope}.", inner)


def of_enums(scope: str, enums: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    for enum in enums:
        yield from (f"{scope}{enum.name} {value.number} {value.name}" for value in enum.value)
        for reserved in enum.reserved_range:
            yield from (f"{scope}{enum.name} {number} reserved" for number in range(reserved.start, reserved.end + 1))


def by_number(lines: Iterable[str]) -> dict[str, str]:
    """What each number means, by message and number."""
    split = (line.split(" ", 2) for line in lines)
    return {f"{scope} {number}": meaning for scope, number, meaning in split}


NOW = by_number(line for module in FILES for line in of_file(module.DESCRIPTOR))
GIVEN_OUT = by_number(LIST.read_text().splitlines())


def test_no_number_has_changed_its_meaning() -> None:
    """Take a new number instead. Reserve that of a field that goes: `reserved 9;`."""
    now = {key: NOW.get(key, "nothing") for key in GIVEN_OUT}
    assert {key: now[key] for key, meaning in GIVEN_OUT.items() if now[key] not in (meaning, "reserved")} == {}


def test_every_number_is_listed() -> None:
    """Append the lines that are missing; remove none."""
    assert [f"{key} {meaning}" for key, meaning in NOW.items() if key not in GIVEN_OUT] == []
