"""A channel to a server: its RPCs as plain callables that raise typed errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from gem_api.errors import DeadlineExceeded, GemError, InvalidRequest, ServerUnavailable, from_status
from gem_api.methods import ADMIN, MAX_MESSAGE_BYTES, TRAINING, methods
from gem_api.process.addresses import DEFAULT_PORT, server_address
from gem_api.process.printable import without_password

from gem_client.transport.security import NONE, Security

Metadata = tuple[tuple[str, str], ...]
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a separate connection, so that sessions in one process do not wait for each other
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),  # some networks drop connections idle for four minutes
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_PROXY = "grpc_proxy"  # gRPC's own variable; no_grpc_proxy names the hosts to reach without it


class Stub:
    """The server's RPCs by name: `stub.GetStatus(request, timeout=...)`.

    Streams carry serialized frames (bytes). Streaming calls raise grpc.RpcError, which `typed_error` and `next_frame` turn into
    GemErrors. One that streams the request alone returns a future.

    Args:
        channel: The channel to the server.
        metadata: Sent with every call.
        address: The server's address, for error messages.
    """

    def __init__(self, channel: grpc.Channel, metadata: Metadata = (), address: str = "") -> None:
        self.address = address
        for method in (*methods(TRAINING), *methods(ADMIN)):
            make = getattr(channel, method.kind)
            rpc = make(method.path, request_serializer=method.serialize_request, response_deserializer=method.parse_response)
            call = rpc.future if method.kind == "stream_unary" else rpc
            if metadata:
                call = partial(call, metadata=metadata)
            setattr(self, method.name, typed(call, address) if method.kind == "unary_unary" else call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the server has no RPC {name!r}")


def checked_address(address: str) -> str:
    """The address with its port, as gRPC expects it. Raises InvalidRequest if it is not an address."""
    if not isinstance(address, str):
        raise InvalidRequest(f"the server's address is a text such as 'localhost:50051', not {address!r}")
    try:
        return server_address(address)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def open_channel(address: str, security: Security = NONE) -> grpc.Channel:
    """Opens a channel. It goes through a proxy only if the environment has one for gRPC: most of those in `http_proxy`, which
    is meant for the web, do not reach a cluster's machines. Raises InvalidRequest if a file of `security` can't be read."""
    return security.channel(address, (*_OPTIONS, ("grpc.enable_http_proxy", int(_PROXY in os.environ))))


def typed_error(error: grpc.RpcError, address: str = "") -> GemError:
    """The typed error for a failed call to `address`.

    Removes the traceback of `error`, which would keep the variables of its frames (such as a gradient) alive.
    """
    error.__traceback__ = None
    if address and error.code() == grpc.StatusCode.UNAVAILABLE:
        details = error.details() or ""
        if _speaks_no_grpc(details):
            return InvalidRequest(
                f"what answers at {address} does not speak gRPC: it is the server's HTTP port, its lane's port, or another "
                f"service's. Give gRPC's port, by default {DEFAULT_PORT}"
            )
        if why := _nobody_there(details, address) or _encrypted_otherwise(details, address):
            return ServerUnavailable(why)
        if _was_closed(details):
            return ServerUnavailable(f"the connection to {address} was closed: the server has ended, or the network has failed")
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return InvalidRequest(f"something between this client and {address or 'the server'} has a limit: {error.details()}")
    metadata = error.trailing_metadata() or ()
    return from_status(error.code(), error.details() or "", [(entry.key, entry.value) for entry in metadata])


def _speaks_no_grpc(details: str) -> bool:
    """Whether gRPC's details say that another protocol was answered: no use to try again. A proxy that answers in HTTP/1 while
    the server is away (502 to 504) may get on with it later."""
    return "Expected SETTINGS frame as the first frame" in details and not re.search(r"HTTP status 50[234]", details)


def _nobody_there(details: str, address: str) -> str:
    """A plain message if gRPC's details say that no server is at `address`; else empty."""
    if proxy := os.environ.get(_PROXY):
        address = f"{address} through the proxy {without_password(proxy)} ({_PROXY})"
    if re.search(r"[Cc]onnect.*(Connection refused|No such file or directory)", details):
        return f"no connection to {address}: refused" if proxy else f"no server at {address} (is gem-server running?)"
    if unreachable := re.search(r"Failed to connect to remote host: (?:getsockopt\(SO_ERROR\): )?([^;]+)", details):
        return f"no connection to {address}: {unreachable[1].strip()}"
    lookup = re.search(r"lookup failed for \S+ (?:os_error: )?([^]]+?)(?: syscall: \w+)?\]", details)
    if lookup and not re.search(r"(?i)not found|not known|no data|no address", lookup[1]):
        return f"can't look up the host of {address} now: {lookup[1]}"
    if re.search(r"hostname lookup error|DNS resolution failed", details):
        return f"the host of {address} is not known (is the name right?)"
    return ""


def _was_closed(details: str) -> bool:
    return "Socket closed" in details or "Connection reset" in details


def _encrypted_otherwise(details: str, address: str) -> str:
    """A plain message if gRPC's details say that this client and the server do not agree on TLS; else empty. Such an error may
    pass, as the server may get another certificate."""
    if "failed to connect to all addresses" not in details:
        return ""
    if "WRONG_VERSION_NUMBER" in details:
        return (
            f"the server at {address} does not use TLS: omit --tls-ca (tls_ca in Python), or give the address of one that does"
        )
    if "Hostname Verification Check failed" in details:
        host = address.rpartition(":")[0]
        return f"the certificate of the server at {address} is for other hosts, not {host}: give an address that it names"
    if rejected := re.search(r"CERTIFICATE_VERIFY_FAILED: ([\w -]+)", details):
        return f"the certificate of the server at {address} is rejected (CERTIFICATE_VERIFY_FAILED: {rejected[1]}): " + (
            "renew it on the server" if "expired" in rejected[1] else "give its own authority as --tls-ca (tls_ca in Python)"
        )
    if _was_closed(details):
        return (
            f"the server at {address} closes each new connection. Does it use TLS? Then give --tls-ca (tls_ca in Python); and "
            "tls_cert and tls_key if it asks for clients' certificates"
        )
    return ""


def next_frame(frames: Iterator[bytes], address: str = "") -> bytes | None:
    """The stream's next frame, or None at its end. Raises the typed error if the stream failed."""
    try:
        return next(frames, None)
    except grpc.RpcError as error:
        raise typed_error(error, address) from None


def typed(call: Callable[..., Any], address: str = "") -> Callable[..., Any]:
    """Makes a unary call raise typed errors."""

    def answered(*arguments: Any, **settings: Any) -> Any:
        try:
            return call(*arguments, **settings)
        except grpc.FutureTimeoutError:
            raise DeadlineExceeded("the server did not respond in time") from None
        except grpc.RpcError as error:
            raise typed_error(error, address) from None
        except ValueError as error:  # gRPC's way to say that the channel was closed
            raise ServerUnavailable(f"the connection was closed: {error}") from None

    return answered
