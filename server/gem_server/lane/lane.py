"""The lane of a server: its port, its threads, and the connections that they serve."""

from __future__ import annotations

import asyncio
import socket

from gem_api.errors import Draining
from gem_api.lane import tune
from gem_api.process.host_limits import cores

from gem_server.event_loop import running_loop
from gem_server.intake.intake import DRAINING, Intake
from gem_server.lane.checks import Checks
from gem_server.lane.commits import LaneServicer
from gem_server.lane.connection import Connection
from gem_server.lane.listener import Listener
from gem_server.lane.pending_connections import PendingConnections
from gem_server.lane.reactor import Reactor, Served
from gem_server.lane.regions import Regions
from gem_server.security.tls import Certificates

# A commit through memory is a few small messages and the pass: one thread does that faster than several that hand over to each
# other. On the network, bytes are copied without Python's global lock, so that more threads are of use; but they fight for that
# lock between two copies, which costs a sixth of the processor time on two cores.
MEMORY_THREADS = 1
# Bytes that the system takes before it can send them. What is written is then nearly on the network: θ's turns end in time.
UNSENT = 1 << 18
NETWORK_THREADS = max(1, min(8, cores() // 2))


class Lane:
    """Made with the server; serves from `start` to `close`.

    Args:
        listener: The addresses and the tokens.
        intake: What all calls share.
        certificates: The server's certificates; None: connections are not encrypted.

    Attributes:
        regions: The memory shared with workers on this machine.
    """

    def __init__(self, listener: Listener, intake: Intake, certificates: Certificates | None) -> None:
        loop, clock, logger = running_loop(), intake.clock, intake.logger
        self.listener = listener
        self.regions = Regions(intake.core, loop)
        self._lock = loop.lock
        self._intake = intake
        self._certificates = certificates
        self._pending = PendingConnections(clock)
        self._checks = Checks(intake.core, loop)
        self._servicer = LaneServicer(intake, loop.lock, listener.redeem, self.regions, self._checks, self._pending)
        self._failed: asyncio.Future[None] = loop.create_future()
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # `run` may have ended
        self._memory = Reactor(loop, clock, logger, MEMORY_THREADS, self._fail)
        self._network = Reactor(loop, clock, logger, NETWORK_THREADS, self._fail)

    @property
    def connections(self) -> int:
        """Connections being served."""
        return self._memory.connections + self._network.connections

    async def run(self) -> None:
        """Accepts connections and has them served; never ends by itself. Raises what ends a thread of the lane."""
        await asyncio.gather(self._failed, self.listener.run(self._serve, self._pending.have_room))

    def start(self) -> None:
        self._memory.start()
        self._network.start()

    def close(self) -> None:
        """Ends all connections; those that send a reply have a moment. Never call it on the event loop's thread."""
        with self._lock:
            self.listener.close()
            self._intake.calls.end_unanswered(Draining(DRAINING))  # lanes that were opened late
        self._memory.close()
        self._network.close()
        self._checks.close()
        with self._lock:
            self.regions.close()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._failed.done():
                self._failed.set_exception(error)

    def _serve(self, sock: socket.socket) -> None:
        """Has a new connection served. The lock is held."""
        try:
            sock.setblocking(False)
            tune(sock)
            nearby = sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]
            if self._certificates is None and not nearby and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
            if self._certificates is not None and sock.family != socket.AF_UNIX:
                sock = self._certificates.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the client has left already
            sock.close()
            return
        except ValueError as error:
            self._intake.logger.warning("can't encrypt a lane", why=str(error))
            sock.close()
            return
        connection = Connection(sock, self._intake.traffic, self._intake.clock, nearby)
        reactor = self._memory if sock.family == socket.AF_UNIX else self._network
        served = connection.served = Served(sock, self._servicer.serve(connection), reactor.wake)
        self._pending.add(served)
        reactor.serve(served)
