"""AdminService: what an operator says."""

from __future__ import annotations

from collections.abc import Callable

from gem_api.v1 import admin_pb2 as pb

from gem_server.apply_loop import ApplyLoop
from gem_server.calls import Call
from gem_server.checkpointer import Checkpointer
from gem_server.edge import Context


class AdminServicer:
    """Serves `gem_api.v1.AdminService`. `stop` begins the server's graceful end."""

    def __init__(self, checkpointer: Checkpointer, apply_loop: ApplyLoop, stop: Callable[[str], None]) -> None:
        self._checkpointer = checkpointer
        self._apply_loop = apply_loop
        self._stop = stop

    async def create_checkpoint(
        self, call: Call, request: pb.CreateCheckpointRequest, context: Context
    ) -> pb.CreateCheckpointResponse:
        version, path = await self._checkpointer.write()
        return pb.CreateCheckpointResponse(version=version, path=str(path))

    async def drain(self, call: Call, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        call.answering = True
        self._stop("asked to drain")
        return pb.DrainResponse(queue_length=self._apply_loop.queue_length)
