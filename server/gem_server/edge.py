"""The seam between gRPC and the servicers: bytes to messages, errors to statuses, one place for both."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from gem_api.errors import GemError, InvalidRequest
from gem_api.logs import Logger
from gem_api.methods import Method, methods
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from gem_server.calls import Calls

Handler = Callable[..., Awaitable[Any]]
MOST_DETAILS = 1000  # characters: the statuses of grpc travel in headers of limited size
Context = Any  # grpc.aio.ServicerContext: grpcio has no type hints


def rpc_handlers(service: ServiceDescriptor, servicer: object, calls: Calls, log: Logger) -> grpc.GenericRpcHandler:
    """gRPC's handlers for a servicer that has a coroutine `snake_case(call, [request,] context)` for each RPC."""
    table = {}
    for method in methods(service):
        serve = _guard(method, getattr(servicer, _snake_case(method.name)), calls, log)
        table[method.name] = getattr(grpc, f"{method.kind}_rpc_method_handler")(serve)
    return grpc.method_handlers_generic_handler(service.full_name, table)


def _guard(method: Method, serve: Handler, calls: Calls, log: Logger) -> Handler:
    async def guarded(request: Any, context: Context) -> bytes | None:
        with calls.serve() as call:
            try:
                if method.kind.endswith("_stream"):
                    # First of all: grpc can't end a call that it cancels while it sends them together with a first frame.
                    await context.send_initial_metadata(())
                arguments = (_parse(method, request), context) if method.parse_request else (context,)
                response = await serve(call, *arguments)
                return method.serialize_response(response) if method.serialize_response else None
            except GemError as error:
                await _abort(context, error)
            except asyncio.CancelledError:
                if call.error is None:
                    raise
                await _abort(context, call.error)
            except Exception:
                if context.cancelled():
                    raise asyncio.CancelledError from None  # the client has gone; grpc has many ways to say so
                log.exception("a call failed in the server; please report this", rpc=method.name)
                await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says how")
        raise AssertionError("abort does not return")

    return guarded


def _parse(method: Method, request: bytes) -> Any:
    assert method.parse_request is not None
    try:
        return method.parse_request(request)
    except DecodeError as error:
        raise InvalidRequest(f"{len(request)} bytes that are no {method.name}Request: {error}") from None


async def _abort(context: Context, error: GemError) -> None:
    await context.abort(error.status, str(error)[:MOST_DETAILS], error.metadata())


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
