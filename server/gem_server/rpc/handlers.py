"""Between gRPC and the servicers: converts bytes to messages, errors to statuses, and callers to identities."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from gem_api.errors import GemError, InvalidRequest, PermissionDenied, Unauthenticated
from gem_api.methods import LARGER_REQUESTS, MAX_REQUEST_BYTES, Method, methods
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from gem_server.intake.calls import Call
from gem_server.intake.intake import Intake
from gem_server.security.access import Access
from gem_server.telemetry.rpc_metrics import CANCELLED, COMMIT, INTERNAL, name_of

Handler = Callable[..., Awaitable[Any]]
MAX_DETAILS = 1000  # characters of an error message: gRPC sends it in a header of limited size
Context = Any  # grpc.aio.ServicerContext: grpcio has no type hints


def rpc_handlers(service: ServiceDescriptor, servicer: object, access: Access, intake: Intake) -> grpc.GenericRpcHandler:
    """gRPC's handlers for a servicer that has a coroutine `snake_case(call, [request,] context)` for each RPC."""
    table = {}
    for method in methods(service):
        guarded = _Guarded(method, getattr(servicer, _snake_case(method.name)), access, intake)
        table[method.name] = getattr(grpc, f"{method.kind}_rpc_method_handler")(guarded.handle)
    return grpc.method_handlers_generic_handler(service.full_name, table)


@dataclass(frozen=True)
class _Guarded:
    """One RPC as gRPC calls it: identifies the caller, converts messages, and answers every error with a status."""

    method: Method
    serve: Handler
    access: Access
    intake: Intake

    async def handle(self, request: Any, context: Context) -> bytes | None:
        began = self.intake.rpcs.clock()
        with self.intake.calls.serve() as call:
            try:
                response = await self._respond(call, request, context)
                self._ended(began)
                return response
            except GemError as error:
                self._ended(began, name_of(error))
                if isinstance(error, Unauthenticated | PermissionDenied):
                    self.intake.logger.warning("call refused", rpc=self.method.name, peer=context.peer(), why=str(error))
                await _abort(context, error)
            except asyncio.CancelledError:
                self._ended(began, name_of(call.error))
                if call.error is None:
                    raise
                await _abort(context, call.error)
            except Exception as error:
                # The client has gone. gRPC reports that in many ways: a frame may fail before the call counts as cancelled.
                if context.cancelled() or isinstance(error, grpc.aio.InternalError):
                    self._ended(began, CANCELLED)
                    raise asyncio.CancelledError from None
                self._ended(began, INTERNAL)
                self.intake.logger.exception("internal error while serving a call; please report it", rpc=self.method.name)
                await context.abort(grpc.StatusCode.INTERNAL, "internal server error; see the server's log")
        raise AssertionError("abort does not return")

    def _ended(self, began: float, error: str = "") -> None:
        """Measures the call. Of a stream of commits, `exchange` measures each commit; what is left are faults of the server."""
        if self.method.name != COMMIT:
            self.intake.rpcs.ended(self.method.name, began, error)
        elif error == INTERNAL:
            self.intake.rpcs.failed(COMMIT, INTERNAL)

    async def _respond(self, call: Call, request: Any, context: Context) -> bytes | None:
        method = self.method
        if method.kind.endswith("_stream"):
            # First, on their own: gRPC can't end a call that it cancels while they are sent with a first frame.
            await context.send_initial_metadata(())
        call.identify = self.access.identifier(method.name, context)
        call.identify()
        arguments = (_parse(method, request, call), context) if method.parse_request else (context,)
        response = await self.serve(call, *arguments)
        if isinstance(response, bytes):  # large, and serialised outside the event loop
            return response
        return method.serialize_response(response) if method.serialize_response else None


def _parse(method: Method, request: bytes, call: Call) -> Any:
    """Parses a request, and checks that the lease that it names, if any, is the caller's. For streams, `Transfer` checks it."""
    assert method.parse_request is not None
    # Before it is parsed: that holds the event loop, and each value takes many times its bytes.
    require_short(f"{method.name}Request", len(request), LARGER_REQUESTS.get(method.name, MAX_REQUEST_BYTES))
    try:
        message = method.parse_request(request)
    except DecodeError as error:
        raise InvalidRequest(f"can't parse the {len(request)} bytes as {method.name}Request: {error}") from None
    call.require_own(getattr(message, "lease_id", ""))
    return message


def require_short(what: str, size: int, limit: int = MAX_REQUEST_BYTES) -> None:
    """Raises InvalidRequest if something of this size in bytes is too large to be looked at."""
    if size > limit:
        raise InvalidRequest(f"{what} has {size} bytes: at most {limit} are allowed")


async def _abort(context: Context, error: GemError) -> None:
    await context.abort(error.status, str(error)[:MAX_DETAILS], error.metadata())


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
