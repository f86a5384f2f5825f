"""Addresses at which lanes are opened: a TCP port, a Unix socket for workers on this machine, and tokens that open a lane."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gem_api.errors import InvalidRequest
from gem_api.process.addresses import host_and_port, where_to_listen, with_port
from gem_api.process.logs import Logger
from gem_api.region import socket_address
from gem_api.v1 import training_pb2 as pb

from gem_server.config import StartError
from gem_server.lane.commits import Ticket
from gem_server.security.access import Identity

TOKEN_BYTES = 16
TOKEN_SECONDS = 30.0
MAX_WAITING = 4096
RETRY_SECONDS = 1.0
_TAKEN = (errno.EADDRINUSE, errno.EACCES)  # by another program, or kept for the administrator
FULL_SECONDS = 0.05  # until room for another connection is looked for again


class Listener:
    """The two addresses, and the tokens.

    Args:
        port: HOST:PORT to listen on; port 0 picks a free one. Empty: none.
        path: The path of a Unix socket, or "@NAME" in Linux's abstract namespace. Empty: none.
        clock: Returns monotonic seconds.
        logger: The server's logger.
        insist: Whether another port will not do if this one is in use.

    Raises:
        StartError: An address can't be used.

    Attributes:
        port: The TCP port; 0 if there is none.
        address: HOST:PORT of it; empty if there is none.
        path: The Unix socket, absolute; empty if there is none.
    """

    def __init__(self, port: str, path: str, clock: Callable[[], float], logger: Logger, insist: bool = True) -> None:
        self._clock = clock
        self._logger = logger
        self._tickets: dict[bytes, Ticket] = {}
        self.path = path if path.startswith("@") else path and os.path.abspath(path)
        self._tcp = self._open_tcp(port, insist) if port else None
        try:
            self._unix = _unix(self.path) if path else None
        except BaseException:
            if self._tcp is not None:
                self._tcp.close()
            raise
        self._inode = _inode(self.path)
        self.port: int = self._tcp.getsockname()[1] if self._tcp is not None else 0
        self.address = with_port(port, self.port) if port else ""

    def _open_tcp(self, address: str, insist: bool) -> socket.socket:
        try:
            return _tcp(address)
        except StartError as error:
            if insist or getattr(error.__cause__, "errno", 0) not in _TAKEN:
                raise
            opened = _tcp(with_port(address, 0))
            lane = with_port(address, opened.getsockname()[1])
            self._logger.warning("the lane's usual port can't be used; it takes a free one", lane=lane, why=str(error))
            return opened

    def offer(self, lease_id: str, identify: Callable[[], Identity]) -> pb.OpenLaneResponse:
        """A new token for a lease; it replaces the lease's last one. Raises InvalidRequest if there is no lane."""
        if not self.port and not self.path:
            raise InvalidRequest("this server has no lane (lane_listen and memory_socket are off): send commits over gRPC")
        now = self._clock()
        self._tickets = {
            token: ticket for token, ticket in self._tickets.items() if ticket.expires_at > now and ticket.lease_id != lease_id
        }
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tickets[token] = Ticket(lease_id, identify, now + TOKEN_SECONDS)
        return pb.OpenLaneResponse(socket=self.path, port=self.port, token=token)

    def redeem(self, token: bytes) -> Ticket:
        """The ticket that a token stands for, once. Raises InvalidRequest."""
        ticket = self._tickets.pop(token, None)
        if ticket is None or ticket.expires_at <= self._clock():
            raise InvalidRequest("the lane's token is unknown or too old: ask for another with OpenLane")
        return ticket

    async def run(self, serve: Callable[[socket.socket], None], have_room: Callable[[], bool]) -> None:
        """Accepts connections while there is room, and hands each to `serve`; never ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            for listening in filter(None, (self._tcp, self._unix)):
                tasks.create_task(self._accept_all(listening, serve, have_room))
            await asyncio.Event().wait()

    async def _accept_all(
        self, listening: socket.socket, serve: Callable[[socket.socket], None], have_room: Callable[[], bool]
    ) -> NoReturn:
        """If there are no file descriptors left, waits and tries again."""
        while True:
            while not have_room():
                await asyncio.sleep(FULL_SECONDS)
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:
                self._logger.warning("can't accept a worker on the lane; trying again", why=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                serve(connection)

    def close(self) -> None:
        """Stops listening, and removes the Unix socket's file, unless another server has replaced it."""
        for listening in filter(None, (self._tcp, self._unix)):
            listening.close()
        if self._inode and _inode(self.path) == self._inode:
            Path(self.path).unlink()


def tcp_socket(address: str) -> socket.socket:
    """A socket that listens on "host:port": on IPv4 and IPv6, if the host means every address. Raises OSError, ValueError."""
    family, place = where_to_listen(*host_and_port(address))
    listening = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listening(listening, place)


def _tcp(address: str) -> socket.socket:
    try:
        return tcp_socket(address)
    except (OSError, ValueError) as error:
        raise StartError(
            f"can't listen on {address} for the lane: give another lane_listen HOST:PORT, or off ({error})"
        ) from error


def _unix(path: str) -> socket.socket:
    """Replaces a socket left by a killed server, but not one at which a server responds."""
    try:
        if not path.startswith("@"):
            file = Path(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_socket():
                _require_abandoned(file)
                file.unlink()
        listening = _listening(socket.socket(socket.AF_UNIX), socket_address(path))
        if not path.startswith("@"):
            os.chmod(path, 0o666)  # the token protects it; workers may run as another user
        return listening
    except OSError as error:
        raise StartError(f"can't share memory at {path} (memory_socket): {error}") from None


def _listening(unbound: socket.socket, place: object) -> socket.socket:
    try:
        unbound.bind(place)  # type: ignore[arg-type]
        unbound.listen(MAX_WAITING)
        unbound.setblocking(False)
    except BaseException:
        unbound.close()
        raise
    return unbound


def _require_abandoned(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise OSError(f"another server answers at {path}: stop it, or name another socket")


def _inode(path: str) -> int:
    """The inode of the socket's file; 0 if there is none."""
    try:
        return 0 if not path or path.startswith("@") else os.stat(path).st_ino
    except OSError:
        return 0
