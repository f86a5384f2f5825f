"""docs/lane.md states the bytes that the server, the SDK and the tests' own client use."""

from __future__ import annotations

import os
import re
import struct

from gem_api import lane, region
from gem_api.errors import GemError
from gem_api.v1 import errors_pb2, lane_pb2
from gem_api.wire import WIRE_FORMATS
from gem_client.transport.pulse import LOOK_SECONDS, SILENT_SECONDS, TRY_SECONDS
from gem_server.lane.connection import HELLO_SECONDS, PATIENCE_SECONDS
from gem_server.lane.listener import TOKEN_BYTES, TOKEN_SECONDS
from gem_server.lane.reactor import QUIET_SECONDS
from kit import raw_lane
from kit.pages import ROOT

PAGE = (ROOT / "docs/lane.md").read_text(encoding="utf-8")
FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # of struct, by size


def rows(heading: str) -> list[list[str]]:
    """The rows of the table that begins with this heading."""
    _, _, rest = PAGE.partition(f"\n| {heading} |")
    assert rest, f"no table begins with {heading!r}"
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_prefix_of_the_page_is_that_of_the_code() -> None:
    table = [(int(offset), int(size), text) for offset, size, text in rows("Offset | Bytes | Field of the prefix")]
    assert [offset for offset, _, _ in table] == [sum(size for _, size, _ in table[:row]) for row in range(len(table))]
    assert sum(size for _, size, _ in table) == lane.PREFIX_BYTES == raw_lane.PREFIX == 24
    layout = "<4s" + "".join(FORMATS[size] for _, size, _ in table[1:])
    assert struct.calcsize(layout) == 24
    message = lane.opening(lane.Kind.COMMIT, lane_pb2.LaneHello(token=b"123"), 77)
    assert struct.unpack(layout, message[:24])[:6] == (b"GEML", 1, 3, 0, 5, 77)
    texts = [text for _, _, text in table]
    assert f"`{lane.MAGIC.decode()}`" in texts[0]
    assert texts[1] == f"version: {lane.VERSION}"
    assert f"{lane.MAX_HEADER_BYTES:,}" in texts[4]


def test_the_kinds_of_the_page_are_those_of_the_code_and_of_the_tests_client() -> None:
    table = {name: int(number) for number, name, *_ in rows("Kind | Name | Sender | Header")}
    assert table == {kind.name: kind.value for kind in lane.Kind}
    assert table == {name: getattr(raw_lane, name) for name in table}


def test_the_example_of_the_page_is_what_the_sdk_and_the_tests_client_send() -> None:
    (text,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    hello = lane_pb2.LaneHello(token=bytes(range(16)))
    assert bytes.fromhex(text) == lane.opening(lane.Kind.HELLO, hello)
    assert bytes.fromhex(text) == raw_lane.message(raw_lane.HELLO, hello.SerializeToString())
    assert f"these {len(bytes.fromhex(text))} bytes" in PAGE


def test_the_memory_of_the_page_is_that_of_the_code() -> None:
    created, descriptor = region.create_region(1025)
    try:
        attached = region.attach_region(descriptor, 1025)
    finally:
        os.close(descriptor)
    distance = attached.theta.__array_interface__["data"][0] - attached.gradient.__array_interface__["data"][0]
    assert [row[0] for row in rows("Offset | Bytes | Content")] == ["0", "4,096", "4,096 + n"]
    pages = 2 * 4096  # n: 1,025 parameters need two pages
    assert distance == pages
    assert created.nbytes == 4096 + 2 * pages


def test_the_sizes_of_payloads_are_those_of_the_formats() -> None:
    sizes = dict(rows("Format | Bytes of the payload"))
    named = {name for cell in sizes for name in re.findall(r"`(\w+)`", cell)}
    assert named == {"FLOAT32", "BFLOAT16", "INT8_BLOCK"}
    formats = WIRE_FORMATS
    for parameters in (1, 256, 1000):
        assert formats["float32"].nbytes(parameters) == 4 * parameters
        assert formats["bfloat16"].nbytes(parameters) == 2 * parameters
        assert formats["int8"].nbytes(parameters) == 4 * -(-parameters // 256) + parameters
    assert {int(size) for size in re.findall(r"(\d)·P", sizes["`FLOAT32`"])} == {4}


def test_the_page_says_what_to_do_on_every_error_that_a_commit_may_have() -> None:
    told = set(re.findall(r"`([A-Z_]+)`", " ".join(row[0] for row in rows("Code | What to do"))))
    codes = {errors_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_") for error in leaves(GemError)}
    of_a_commit = codes - {"UNSPECIFIED", "CHECKPOINT_FAILED", "SETTINGS_DIFFER"}
    assert told == of_a_commit


def leaves(error: type[GemError]) -> list[type[GemError]]:
    """The errors of the tree that have a code of their own."""
    found = [leaf for child in error.__subclasses__() for leaf in leaves(child)]
    return [*found, *([error] if getattr(error, "code", 0) else [])]


def test_the_limits_of_the_page_are_those_of_the_server() -> None:
    assert f"`token` | {TOKEN_BYTES} bytes. They open one lane for this lease, once, within {TOKEN_SECONDS:g} seconds." in PAGE
    assert f"| {PATIENCE_SECONDS:g} seconds, then the server closes the connection |" in section("8. Limits")
    assert f"| {HELLO_SECONDS:g} seconds, and 4·P + {lane.MAX_HEADER_BYTES:,} bytes." in section("8. Limits")
    assert f"send nothing for {QUIET_SECONDS:g} seconds" in section("8. Limits")
    vanished = max(
        lane._KEEPALIVE["TCP_KEEPIDLE"] + lane._KEEPALIVE["TCP_KEEPINTVL"] * lane._KEEPALIVE["TCP_KEEPCNT"],
        lane._KEEPALIVE["TCP_USER_TIMEOUT"] // 1000,
    )
    assert f"within {vanished} seconds (TCP keep-alive)" in section("8. Limits")
    silent = section("6. Exactly once")
    assert f"no byte moves for {LOOK_SECONDS:g} seconds" in silent
    assert f"none has come for {SILENT_SECONDS:g} seconds" in silent
    assert f"it can't within {TRY_SECONDS:g} seconds" in silent
