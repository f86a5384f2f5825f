"""Gives shared memory to workers on this machine, over a Unix socket: only that can pass a file descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from gem_api.errors import GemError, InvalidRequest, Overloaded
from gem_api.process.logs import Logger
from gem_api.region import Region, create_region, held_elsewhere, open_again, socket_address
from gem_api.v1 import training_pb2 as pb

from gem_server.core.state_machine import Core

TOKEN_BYTES = 16
PATIENCE_SECONDS = 10.0
MAX_VISITORS = 64  # connections served at a time
MAX_WAITING = 4096
RETRY_SECONDS = 1.0
MAX_LEFT_OVER = 256  # regions that workers still map after their lease has ended; each keeps a descriptor open here


@dataclass
class _Handed:
    """A lease's region: its bytes, and its descriptor once it is made."""

    nbytes: int
    descriptor: int | None = None


class MemorySocket:
    """The server's Unix socket. A visitor (a process that connects) must present a token that its worker got over gRPC.

    Args:
        address: A path, or "@NAME" in Linux's abstract namespace; empty: no memory is shared.
        core: The state machine; its leases hold the regions.
        logger: The server's logger.

    Raises:
        OSError: The address can't be used.
    """

    def __init__(self, address: str, core: Core, logger: Logger) -> None:
        self._address = address = address if address.startswith("@") else address and os.path.abspath(address)
        self._core = core
        self._logger = logger
        self._leases: dict[bytes, str] = {}
        self._handed: dict[str, _Handed] = {}  # by lease, live or ended
        self._visitors: set[asyncio.Task[None]] = set()
        self._socket = _listen(address) if address else None
        self._inode = _inode(address)

    def offer(self, lease_id: str) -> pb.ShareMemoryResponse:
        """Returns the socket and a new token for the worker of a live lease. Raises InvalidRequest if the server shares no
        memory."""
        if self._socket is None:
            raise InvalidRequest("this server shares no memory (--memory-socket off): send tensors over the network")
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
        free = asyncio.Semaphore(MAX_VISITORS)
        while True:
            await free.acquire()
            connection = await self._accept(self._socket)
            visit = asyncio.create_task(self._visit(connection))
            self._visitors.add(visit)
            visit.add_done_callback(self._visitors.discard)
            visit.add_done_callback(lambda _: free.release())

    async def _accept(self, listening: socket.socket) -> socket.socket:
        """Accepts the next connection. If there are no file descriptors left, waits and tries again."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                return connection
            except OSError as error:
                self._logger.warning("can't accept a worker on the memory socket; trying again", why=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Stops listening, and removes the socket's file, unless another server has replaced it."""
        for handed in self._handed.values():
            if handed.descriptor is not None:
                os.close(handed.descriptor)
        self._handed.clear()
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
            self._logger.info(
                "a worker got no shared memory; it sends its tensors over the network", why=f"{type(error).__name__}: {error}"
            )

    async def _hand_over(self, connection: socket.socket) -> None:
        token = await _read(connection, TOKEN_BYTES)
        lease_id = self._leases.pop(token, None)
        if lease_id is None:
            raise InvalidRequest("the visitor's token is unknown")
        self._core.leases.get(lease_id)
        if lease_id not in self._handed:
            await self._make(lease_id)
        handed = self._handed[lease_id]
        if handed.descriptor is None:
            raise Overloaded("this lease's shared memory is being made for another visitor: try again")
        theirs = open_again(handed.descriptor)
        try:
            socket.send_fds(connection, [b"\1"], [theirs])
        finally:
            os.close(theirs)

    async def _make(self, lease_id: str) -> None:
        """Makes the lease's one region. Its memory counts from before it is made until no process maps it any more.

        Raises:
            Overloaded: There is no room for it, or too many of ended leases are still mapped.
            LeaseEnded: The lease has ended meanwhile.
            OSError: The system has no such memory, or can't tell who maps it.
        """
        self.take_back()
        if sum(other not in self._core.leases.live for other in self._handed) >= MAX_LEFT_OVER:
            raise Overloaded(f"{MAX_LEFT_OVER} regions are still mapped by workers whose lease has ended: end those processes")
        self._handed[lease_id] = _Handed(self._core.memory.reserve_region())
        making = asyncio.ensure_future(asyncio.to_thread(create_region, self._core.central.size))
        try:
            region, self._handed[lease_id].descriptor = await asyncio.shield(making)
            _require_traceable(making.result()[1])
            self._core.offer_region(lease_id, region)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._discard(lease_id, made))
            raise
        except BaseException:
            self._forget(lease_id)
            raise

    def take_back(self) -> None:
        """Stops counting regions that belong to no lease and that no process maps any more."""
        for lease_id, handed in list(self._handed.items()):
            if handed.descriptor is None or lease_id in self._core.leases.live:
                continue
            with contextlib.suppress(OSError):  # no descriptor is free to find out with: asked again later
                if not held_elsewhere(handed.descriptor):
                    self._forget(lease_id)

    def _discard(self, lease_id: str, made: asyncio.Future[tuple[Region, int]]) -> None:
        """Drops a region that was made too late: its worker no longer waits for it."""
        if made.exception() is None:
            os.close(made.result()[1])
        self._forget(lease_id)

    def _forget(self, lease_id: str) -> None:
        handed = self._handed.pop(lease_id, None)
        if handed is None:
            return  # the server has stopped meanwhile
        self._core.memory.regions -= handed.nbytes
        if handed.descriptor is not None:
            os.close(handed.descriptor)


def _require_traceable(descriptor: int) -> None:
    """Raises OSError if the system can't tell whether other processes still map a region: its memory could not be counted."""
    theirs = open_again(descriptor)
    try:
        if not held_elsewhere(descriptor):
            raise OSError("this system does not report which processes map shared memory")
    finally:
        os.close(theirs)


def _inode(address: str) -> int:
    """The inode of the socket's file; 0 if there is none."""
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
    """Opens the listening socket. It replaces a path left by a killed server, but not one at which a server responds."""
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
            os.chmod(address, 0o666)  # the token protects it; workers may run as another user
        listening.listen(MAX_WAITING)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _require_abandoned(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise OSError(f"another server answers at {path}: stop it, or name another socket")
