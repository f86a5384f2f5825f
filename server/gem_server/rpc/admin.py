"""AdminService: the operator's requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gem_api.framing import CHUNK_BYTES
from gem_api.process.logs import Logger
from gem_api.v1 import admin_pb2 as pb

from gem_server.apply_loop import ApplyLoop
from gem_server.core.quarantine import Quarantine
from gem_server.durability.checkpointer import Checkpointer
from gem_server.intake.calls import Call
from gem_server.rpc.handlers import Context


@dataclass(frozen=True, eq=False)
class AdminServicer:
    """Serves `gem_api.v1.AdminService`. `stop` begins the server's graceful shutdown."""

    checkpointer: Checkpointer
    apply_loop: ApplyLoop
    quarantine: Quarantine
    stop: Callable[[str], None]
    logger: Logger

    async def create_checkpoint(
        self, call: Call, request: pb.CreateCheckpointRequest, context: Context
    ) -> pb.CreateCheckpointResponse:
        written = await self.checkpointer.write()
        return pb.CreateCheckpointResponse(version=written.version, path=str(written.path), sha256=written.sha256)

    async def read_checkpoint(self, call: Call, request: pb.ReadCheckpointRequest, context: Context) -> None:
        in_thread = self.checkpointer.in_thread
        with ExitStack() as opened:
            for file in await in_thread(partial(self.checkpointer.open_files, request.path, opened)):
                while data := await in_thread(partial(file.read, CHUNK_BYTES)):
                    await context.write(pb.ReadCheckpointResponse(file=Path(file.name).name, data=data).SerializeToString())

    async def drain(self, call: Call, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        call.answering = True
        self.stop("asked to drain")
        return pb.DrainResponse(queue_length=self.apply_loop.queue_length)

    async def list_quarantine(
        self, call: Call, request: pb.ListQuarantineRequest, context: Context
    ) -> pb.ListQuarantineResponse:
        held = self.quarantine.held.items()
        return pb.ListQuarantineResponse(
            workers=[pb.QuarantinedWorker(name=name, refusals=refusals.count, why=refusals.why) for name, refusals in held]
        )

    async def lift_quarantine(
        self, call: Call, request: pb.LiftQuarantineRequest, context: Context
    ) -> pb.LiftQuarantineResponse:
        self.quarantine.lift(request.worker_name)
        self.logger.info("quarantine lifted", worker=request.worker_name)
        return pb.LiftQuarantineResponse()
