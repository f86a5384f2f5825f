"""The lane's TCP port: accepts connections, and knows the tokens that open them."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable

from gem_api.errors import InvalidRequest
from gem_api.process.logs import Logger
from gem_api.v1 import training_pb2 as pb

from gem_server.config import StartError
from gem_server.lane.commits import Ticket
from gem_server.security.access import Identity

TOKEN_BYTES = 16
TOKEN_SECONDS = 30.0
MAX_WAITING = 4096
RETRY_SECONDS = 1.0


class Listener:
    """The port and the tokens.

    Args:
        address: HOST:PORT to listen on; port 0 picks a free one. Empty: there is no lane.
        clock: Returns monotonic seconds.
        logger: The server's logger.

    Raises:
        StartError: The address can't be used.

    Attributes:
        port: The port; 0 if there is none.
    """

    def __init__(self, address: str, clock: Callable[[], float], logger: Logger) -> None:
        self._clock = clock
        self._logger = logger
        self._tickets: dict[bytes, Ticket] = {}
        self._socket = _listen(address) if address else None
        self.port: int = self._socket.getsockname()[1] if self._socket is not None else 0

    def offer(self, lease_id: str, identify: Callable[[], Identity]) -> pb.OpenLaneResponse:
        """A new token for a lease; it replaces the lease's last one. Raises InvalidRequest if there is no lane."""
        if not self.port:
            raise InvalidRequest("this server has no lane (--lane-listen off): send commits over gRPC")
        now = self._clock()
        self._tickets = {
            token: ticket for token, ticket in self._tickets.items() if ticket.expires_at > now and ticket.lease_id != lease_id
        }
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tickets[token] = Ticket(lease_id, identify, now + TOKEN_SECONDS)
        return pb.OpenLaneResponse(port=self.port, token=token)

    def redeem(self, token: bytes) -> Ticket:
        """What a token stands for, once. Raises InvalidRequest."""
        ticket = self._tickets.pop(bytes(token), None)
        if ticket is None or ticket.expires_at <= self._clock():
            raise InvalidRequest("the lane's token is unknown or too old: ask for another with OpenLane")
        return ticket

    async def run(self, serve: Callable[[socket.socket], None]) -> None:
        """Accepts connections, and hands each to `serve`; never ends by itself."""
        if self._socket is None:
            await asyncio.Event().wait()
            return
        while True:
            serve(await self._accept(self._socket))

    async def _accept(self, listening: socket.socket) -> socket.socket:
        """Accepts the next connection. If there are no file descriptors left, waits and tries again."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                return connection
            except OSError as error:
                self._logger.warning("can't accept a worker on the lane; trying again", why=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(MAX_WAITING)
        listening.setblocking(False)
    except OSError as error:
        raise StartError(f"can't listen on {address} (--lane-listen): {error.strerror or error}") from None
    return listening
