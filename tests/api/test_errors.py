"""The error tree and its conversion to and from gRPC statuses, for every error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import gem_api
import grpc
import pytest
from gem_api import errors
from gem_api.errors import (
    DeadlineExceeded,
    GemError,
    InvalidRequest,
    LeaseEnded,
    Overloaded,
    ServerUnavailable,
    TransportError,
    from_status,
)
from gem_api.v1 import errors_pb2 as pb

TREE = {kind.__name__: kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, GemError)}
LEAVES = [kind for kind in TREE.values() if not kind.__subclasses__()]
WITHOUT_METADATA = {
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.CANCELLED: ServerUnavailable,
    grpc.StatusCode.UNKNOWN: ServerUnavailable,
    grpc.StatusCode.INTERNAL: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def drawn() -> dict[str, tuple[str, str]]:
    """The tree in the module's docstring: name -> (parent, what stands beside it)."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.fullmatch(r"((?:[│ ]   )*(?:[├└]── )?)(\w+)( .*)?", line)
        if match and (match[2] == "GemError" or "──" in line):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            found[match[2]] = (path[depth - 1] if depth else "Exception", match[3] or "")
    return found


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    assert {name: parent for name, (parent, _) in drawn().items()} == {
        name: kind.__base__.__name__ for name, kind in TREE.items() if kind.__base__
    }


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_the_docstring_names_the_status_of_each_error(kind: type[GemError]) -> None:
    _, beside = drawn()[kind.__name__]
    assert kind.status.name in beside


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_an_error_crosses_the_wire_as_itself(kind: type[GemError]) -> None:
    """Every leaf of the tree: an error that was forgotten in the mapping fails here. Metadata may arrive as bytes."""
    sent = kind("why it failed")
    for metadata in (sent.metadata(), [(key, value.encode()) for key, value in sent.metadata()]):
        received = from_status(sent.status, str(sent), metadata)
        assert type(received) is kind
        assert "why it failed" in str(received)


def test_the_end_of_a_lease_keeps_its_reason_or_says_that_it_is_unknown() -> None:
    bare = [(errors.ERROR_KEY, "LEASE_ENDED")]
    for metadata, reason in ((LeaseEnded("gone", "expired").metadata(), "expired"), (bare, "unknown")):
        received = from_status(grpc.StatusCode.FAILED_PRECONDITION, "gone", metadata)
        assert isinstance(received, LeaseEnded)
        assert received.reason == reason


def test_the_contract_and_the_classes_agree_on_statuses() -> None:
    stated = {code: status for status, code in _pairs()}
    mine = {pb.ErrorCode.Name(kind.code).removeprefix("ERROR_CODE_"): kind.status.name for kind in LEAVES if kind.code}
    assert stated == mine


def _pairs() -> list[tuple[str, str]]:
    """(status, code) from errors.proto: the first word of the comment above each code."""
    text = (Path(gem_api.__file__).parent / "v1" / "errors.proto").read_text(encoding="utf-8")
    pairs, status = [], ""
    for previous, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        if line.startswith("  // ") and not previous.startswith("  // "):
            status = line[5:].split(".")[0]
        if (match := re.match(r"  ERROR_CODE_(\w+) = [1-9]", line)) is not None:
            pairs.append((status, match[1]))
    return pairs


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
def test_a_bare_status_is_retried_only_where_that_is_known_to_be_safe(status: grpc.StatusCode) -> None:
    received = from_status(status, "no metadata", [])
    assert type(received) is WITHOUT_METADATA.get(status, InvalidRequest)
    if status not in WITHOUT_METADATA:
        assert not isinstance(received, (TransportError, Overloaded, LeaseEnded))
        assert status.name in str(received)


def test_an_error_that_a_newer_server_invented_is_judged_by_its_status() -> None:
    metadata = [(errors.ERROR_KEY, "SOMETHING_NEW")]
    assert type(from_status(grpc.StatusCode.UNAVAILABLE, "", metadata)) is ServerUnavailable
    assert type(from_status(grpc.StatusCode.FAILED_PRECONDITION, "", metadata)) is InvalidRequest


@pytest.mark.parametrize("junk", ["", "UNSPECIFIED", "lease_ended", b"\xff\xfe", "TransportError"])
def test_junk_in_the_metadata_is_no_error_of_ours(junk: str | bytes) -> None:
    assert type(from_status(grpc.StatusCode.ABORTED, "", [(errors.ERROR_KEY, junk)])) is InvalidRequest
