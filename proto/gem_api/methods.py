"""The methods of the services, as gRPC needs them: tensor streams carry raw bytes, other calls carry messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from gem_api.v1 import admin_pb2, training_pb2

TRAINING = training_pb2.DESCRIPTOR.services_by_name["TrainingService"]
# Enough for a layout of 100,000 tensors in one message. The tensors themselves travel in chunks.
MAX_MESSAGE_BYTES = 32 << 20
MAX_REQUEST_BYTES = 64 << 10  # of a request in one message, or of what a frame holds beside its chunk
LARGER_REQUESTS = {"RegisterWorker": 8 << 20}  # a registration holds something for each tensor
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


class Method(NamedTuple):
    """One RPC: its path on the wire, the kind of call, and the conversions between messages and bytes.

    A streamed side has no conversion: it carries tensor frames, which framing.py reads and writes.
    """

    name: str
    path: str
    kind: str  # "unary_unary", "unary_stream", "stream_unary", "stream_stream": grpc's own names
    serialize_request: Callable[[Any], bytes] | None
    parse_request: Callable[[bytes], Any] | None
    serialize_response: Callable[[Any], bytes] | None
    parse_response: Callable[[bytes], Any] | None


def methods(service: ServiceDescriptor) -> list[Method]:
    """The methods of a service."""
    return [_method(service, method) for method in service.methods]


def _method(service: ServiceDescriptor, method: MethodDescriptor) -> Method:
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    streams = method.client_streaming, method.server_streaming
    return Method(
        name=method.name,
        path=f"/{service.full_name}/{method.name}",
        kind="_".join("stream" if streamed else "unary" for streamed in streams),
        serialize_request=None if streams[0] else request.SerializeToString,
        parse_request=None if streams[0] else request.FromString,
        serialize_response=None if streams[1] else response.SerializeToString,
        parse_response=None if streams[1] else response.FromString,
    )
