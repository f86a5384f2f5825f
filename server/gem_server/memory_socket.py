"""Hands regions of shared memory to workers on this machine, over a Unix socket: the one way to pass a file descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path

from gem_api.errors import GemError, InvalidRequest
from gem_api.logs import Logger
from gem_api.region import Region, create_region, socket_address
from gem_api.v1 import training_pb2 as pb

from gem_server.core import Core

TOKEN_BYTES = 16
PATIENCE_SECONDS = 10.0
MOST_VISITORS = 64  # served at a time
MOST_WAITING = 4096
RETRY_SECONDS = 1.0


class MemorySocket:
    """The server's Unix socket. What a visitor must know is a token that the worker got under its lease, over gRPC.

    Args:
        address: Path, or "@NAME" in Linux's abstract namespace; empty to share no memory.
        core: Keeps the regions with the leases.
        log: The server's log.

    Raises:
        OSError: The address can't be used.
    """

    def __init__(self, address: str, core: Core, log: Logger) -> None:
        self._address = address = address if address.startswith("@") else address and os.path.abspath(address)
        self._core = core
        self._log = log
        self._leases: dict[bytes, str] = {}
        self._visitors: set[asyncio.Task[None]] = set()
        self._socket = _listen(address) if address else None
        self._inode = _inode(address)

    def offer(self, lease_id: str) -> pb.ShareMemoryResponse:
        """Where the worker of a live lease gets its region. Raises InvalidRequest if the server shares no memory."""
        if self._socket is None:
            raise InvalidRequest("this server shares no memory (--memory-socket off): send chunks")
        self._leases = {token: other for token, other in self._leases.items() if other in self._core.leases.live}
        for token in [token for token, other in self._leases.items() if other == lease_id]:
            del self._leases[token]
        token = secrets.token_bytes(TOKEN_BYTES)
        self._leases[token] = lease_id
        return pb.ShareMemoryResponse(socket=self._address, token=token)

    async def run(self) -> None:
        """Serves visitors, a bounded number at a time; never ends by itself."""
        if self._socket is None:
            await asyncio.Event().wait()
            return
        free = asyncio.Semaphore(MOST_VISITORS)
        while True:
            await free.acquire()
            connection = await self._accept(self._socket)
            visit = asyncio.create_task(self._visit(connection))
            self._visitors.add(visit)
            visit.add_done_callback(self._visitors.discard)
            visit.add_done_callback(lambda _: free.release())

    async def _accept(self, listening: socket.socket) -> socket.socket:
        """The next visitor; one that can't be let in now, for want of descriptors, waits."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                return connection
            except OSError as error:
                self._log.warning("can't take a worker that wants shared memory; trying again", why=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Ends the listening; the socket's file goes too, unless another server has put its own there meanwhile."""
        if self._socket is not None:
            self._socket.close()
            if self._inode and _inode(self._address) == self._inode:
                Path(self._address).unlink()

    async def _visit(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setblocking(False)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._hand_over(connection)
        except (GemError, OSError, MemoryError, TimeoutError) as error:
            self._log.info("no shared memory for a worker; it sends chunks", why=f"{type(error).__name__}: {error}")

    async def _hand_over(self, connection: socket.socket) -> None:
        token = await _read(connection, TOKEN_BYTES)
        lease_id = self._leases.pop(token, None)
        if lease_id is None:
            raise InvalidRequest("a visitor without a token")
        self._core.require_room_for_region(lease_id)
        region, descriptor = await _create(self._core.central.size)
        try:
            self._core.offer_region(lease_id, region)
            socket.send_fds(connection, [b"\1"], [descriptor])
        finally:
            os.close(descriptor)


async def _create(parameters: int) -> tuple[Region, int]:
    """`create_region`, in a thread. Where nobody waits for it any more its descriptor is closed, and the memory freed."""
    making = asyncio.ensure_future(asyncio.to_thread(create_region, parameters))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(made: asyncio.Future[tuple[Region, int]]) -> None:
    if made.exception() is None:
        os.close(made.result()[1])


def _inode(address: str) -> int:
    """Of the socket's file; 0 where there is none."""
    try:
        return 0 if not address or address.startswith("@") else os.stat(address).st_ino
    except OSError:
        return 0


async def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not more:
            raise ConnectionError("the visitor hung up")
        data += more
    return data


def _listen(address: str) -> socket.socket:
    """The listening socket. A path left behind by a killed server is taken over; one that a server answers at is not."""
    if not address.startswith("@"):
        path = Path(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            _require_abandoned(path)
            path.unlink()
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(socket_address(address))
        if not address.startswith("@"):
            os.chmod(address, 0o666)  # the token is the key; workers may run as another user
        listening.listen(MOST_WAITING)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _require_abandoned(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise OSError(f"another server answers at {path}: stop it, or name another socket")
