"""The ports that a server listens on: gRPC with health checks and reflection; HTTP with the live page, metrics and probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from gem_api.methods import ADMIN, MAX_MESSAGE_BYTES, TRAINING
from gem_api.process.addresses import is_unix
from gem_api.process.files import OWN_LIMITS, advice
from gem_api.process.http_port import serve_metrics
from gem_api.process.logs import Logger
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client.registry import CollectorRegistry

from gem_server.config import ServerConfig, StartError
from gem_server.intake.intake import Intake
from gem_server.lane.listener import tcp_socket
from gem_server.rpc.handlers import rpc_handlers
from gem_server.security.access import Access
from gem_server.security.tls import Certificates
from gem_server.security.tokens import TokenFile
from gem_server.telemetry.health import Health
from gem_server.telemetry.live_page import LivePage
from gem_server.telemetry.run_view import RunView

REPLY_GRACE_SECONDS = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers on one port would share out the workers by chance
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class Endpoint:
    """Takes the server's addresses when it is made, and serves gRPC from `start` to `close`.

    Args:
        config: The addresses, and who may call.
        registry: The metrics to serve.
        logger: The server's logger.

    Raises:
        StartError: An address can't be used, or the file of tokens or certificates is invalid.

    Attributes:
        port: The port that gRPC is served on.
        http_address: "host:port" of the live page, the metrics and the probes; empty if they are not served.
        health: Answers the probes.
        access: Identifies callers.
        certificates: The server's certificates; None without TLS.
    """

    def __init__(self, config: ServerConfig, registry: CollectorRegistry, logger: Logger) -> None:
        self._server = grpc.aio.server(options=_CHANNEL_OPTIONS)
        self._grpc_health = HealthServicer()
        self.health = Health()
        self._page = LivePage(registry, self.health)
        try:
            tokens = _tokens(config, logger)
            self.certificates = Certificates(config.tls, logger) if config.tls is not None else None
            self.access = Access(tokens, config.tls is not None and config.tls.client_ca is not None)
            self.port = _bind(self._server, config.listen, self.certificates)
            self.http_address = serve_metrics(config.metrics_listen, registry, self._page)
        except ValueError as error:
            raise StartError(str(error)) from None

    def add_services(self, training: object, admin: object, intake: Intake) -> None:
        """Adds the contract's services, and health checks, which are open to everyone because containers need them. Reflection
        is added only if no credentials are required."""
        for service, servicer in ((TRAINING, training), (ADMIN, admin)):
            handlers = rpc_handlers(service, servicer, self.access, intake)
            self._server.add_generic_rpc_handlers([handlers])
        health_pb2_grpc.add_HealthServicer_to_server(self._grpc_health, self._server)
        if not self.access.asks:
            services = (TRAINING, ADMIN, health_pb2.DESCRIPTOR.services_by_name["Health"])
            names = [service.full_name for service in services]
            reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], self._server)

    def show(self, view: RunView) -> None:
        """Shows the run on the live page. Call it on the event loop's thread."""
        self._page.show(view, asyncio.get_running_loop())

    async def start(self, why_stalled: Callable[[], str]) -> None:
        """Serves, and reports it as healthy. `why_stalled` returns why commits can't be acknowledged; empty if they can."""
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.health.serving(why_stalled)

    async def report_ending(self) -> None:
        """Health checks report from now on that the server is about to stop."""
        self.health.ending()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def close(self) -> None:
        """Stops serving. Calls in progress have `REPLY_GRACE_SECONDS` to end."""
        await self._server.stop(REPLY_GRACE_SECONDS)

    async def _set_health(self, status: int) -> None:
        for name in ("", TRAINING.full_name, ADMIN.full_name):
            await self._grpc_health.set(name, status)


def _tokens(config: ServerConfig, logger: Logger) -> TokenFile | None:
    """Raises ValueError, which names the option."""
    try:
        return TokenFile(config.tokens, logger) if config.tokens is not None else None
    except ValueError as error:
        raise ValueError(f"--tokens: {error}") from None


_OTHER_PORT = "give another HOST:PORT with --listen, and beside another server with --metrics-listen too"


def _bind(server: Any, address: str, certificates: Certificates | None) -> int:
    try:
        if not is_unix(address):
            tcp_socket(address).close()  # gRPC writes a line of its own to standard error before it raises
        if certificates is not None:
            return int(server.add_secure_port(address, certificates.credentials()))
        return int(server.add_insecure_port(address))
    except (RuntimeError, OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).partition(";")[0]
        what = advice(error) if getattr(error, "errno", 0) in OWN_LIMITS else ""
        raise StartError(f"can't listen on {address}: {why}; {what or _OTHER_PORT}") from None
