"""AdminService: the operator's requests."""

from __future__ import annotations

from collections.abc import Callable

from gem_api.errors import InvalidRequest
from gem_api.process.logs import Logger
from gem_api.v1 import admin_pb2 as pb

from gem_server.apply_loop import ApplyLoop
from gem_server.core.quarantine import Quarantine
from gem_server.durability.checkpointer import Checkpointer
from gem_server.rpc.calls import Call
from gem_server.rpc.handlers import Context

NOT_RANGED = "this server holds all of the model: CreateCheckpoint alone writes its checkpoint"


class AdminServicer:
    """Serves `gem_api.v1.AdminService`. `stop` begins the server's graceful shutdown."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        apply_loop: ApplyLoop,
        quarantine: Quarantine,
        stop: Callable[[str], None],
        logger: Logger,
    ) -> None:
        self._checkpointer = checkpointer
        self._apply_loop = apply_loop
        self._quarantine = quarantine
        self._stop = stop
        self._logger = logger

    async def create_checkpoint(
        self, call: Call, request: pb.CreateCheckpointRequest, context: Context
    ) -> pb.CreateCheckpointResponse:
        version, path = await self._checkpointer.write()
        return pb.CreateCheckpointResponse(version=version, path=str(path))

    async def begin_checkpoint(
        self, call: Call, request: pb.BeginCheckpointRequest, context: Context
    ) -> pb.BeginCheckpointResponse:
        raise InvalidRequest(NOT_RANGED)

    async def write_manifest(self, call: Call, request: pb.WriteManifestRequest, context: Context) -> pb.WriteManifestResponse:
        raise InvalidRequest(NOT_RANGED)

    async def drain(self, call: Call, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        call.answering = True
        self._stop("asked to drain")
        return pb.DrainResponse(queue_length=self._apply_loop.queue_length)

    async def list_quarantine(
        self, call: Call, request: pb.ListQuarantineRequest, context: Context
    ) -> pb.ListQuarantineResponse:
        held = self._quarantine.held.items()
        return pb.ListQuarantineResponse(
            workers=[pb.QuarantinedWorker(name=name, refusals=refusals.count, why=refusals.why) for name, refusals in held]
        )

    async def lift_quarantine(
        self, call: Call, request: pb.LiftQuarantineRequest, context: Context
    ) -> pb.LiftQuarantineResponse:
        self._quarantine.lift(request.worker_name)
        self._logger.info("quarantine lifted", worker=request.worker_name)
        return pb.LiftQuarantineResponse()
