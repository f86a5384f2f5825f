"""The servers of all ranges of θ: asks those that the leader names, and formats what they say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gem_api.errors import GemError
from gem_api.process.message_json import as_dict
from gem_api.process.printable import printable
from gem_api.v1 import training_pb2 as pb
from gem_client.admin import Admin
from gem_client.range_checkpoint import ranges_apart

from gem_ctl import text

COLUMNS = ("range", "server", "version", "parameters", "memory", "queue", "state")
_RUN_STATES = (pb.RUN_STATE_WAITING, pb.RUN_STATE_TRAINING, pb.RUN_STATE_COMPLETE)  # others are of one server
_ROW = "{:<6} {:<28} {:>10} {:>12} {:>22} {:>6}  {}"


@dataclass(frozen=True)
class RangeState:
    """The server of a range, as it is now.

    Attributes:
        index: The range's number.
        address: The server's address.
        status: Its status; None if it did not respond.
        trouble: What is wrong with it; empty if nothing is.
    """

    index: int
    address: str
    status: pb.GetStatusResponse | None = None
    trouble: str = ""


class Peers:
    """Asks the servers of the other ranges for their status, all at the same time.

    Args:
        open_admin: Opens a connection to an address.
    """

    def __init__(self, open_admin: Callable[[str], Admin]) -> None:
        self._open_admin = open_admin
        self._asked: dict[str, _Server] = {}

    def look(self, leader: pb.GetStatusResponse, patience: float) -> list[RangeState]:
        """Asks all servers that the leader's status names, in order, and waits up to `patience` seconds for their responses.

        For a server that has not responded by then, the state is its last known one. Empty if there are no other ranges.
        """
        for address in self._asked.keys() - set(leader.peers):
            self._asked.pop(address).close()
        for address in leader.peers:
            self._asked.setdefault(address, _Server(address, self._open_admin)).ask(leader)
        servers = [self._asked[address] for address in leader.peers]
        until = time.monotonic() + patience
        for server in servers:
            server.answered.wait(max(0.0, until - time.monotonic()))
        return [server.state(index, leader) for index, server in enumerate(servers, 1)]

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._asked.values():
            server.close()


class _Server:
    """One server. Its thread asks it, as a server that does not respond must not hold up the others."""

    def __init__(self, address: str, open_admin: Callable[[str], Admin]) -> None:
        self._address, self._open_admin = address, open_admin
        self._admin: Admin | None = None
        self._status: pb.GetStatusResponse | None = None
        self._why = "no response yet"
        self._age = ""
        self.answered = threading.Event()
        self.answered.set()

    def ask(self, leader: pb.GetStatusResponse) -> None:
        """Asks for the status, unless the last request is still under way. `leader` is the leader's, which was asked before."""
        if self.answered.is_set():
            self.answered.clear()
            threading.Thread(target=self._ask, args=(leader,), daemon=True).start()

    def _ask(self, leader: pb.GetStatusResponse) -> None:
        try:
            self._admin = self._admin or self._open_admin(self._address)
            self._status, self._why = self._admin.status(), ""
            self._age = _age(self._status, leader)
        except (GemError, ValueError) as error:  # ValueError: the connection was closed meanwhile
            self._status = None
            self._why = f"unreachable: {text.error(error) if isinstance(error, GemError) else error}"
        finally:
            self.answered.set()

    def state(self, index: int, leader: pb.GetStatusResponse) -> RangeState:
        """The server's last known state, as the server of a range of the leader's run."""
        status = self._status
        trouble = self._why if status is None else _trouble(index, status, leader)
        shown = status if trouble else _with_the_runs_state(status, leader)
        return RangeState(index, self._address, shown, trouble or self._age)

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()


def _age(status: pb.GetStatusResponse, leader: pb.GetStatusResponse) -> str:
    """Whether this server is more behind the leader, which was asked before it, than workers can cause; empty if not."""
    if status.run_id != leader.run_id or leader.version - status.version <= ranges_apart(leader, status):
        return ""
    return f"older than range 0, at version {leader.version}: its folder was probably replaced; see gem-ctl reshard --help"


def _trouble(index: int, status: pb.GetStatusResponse, leader: pb.GetStatusResponse) -> str:
    """The reason why this server is not that of this range of the leader's run; empty if it is."""
    if (status.range_index, status.range_count) != (index, leader.range_count):
        return f"holds range {status.range_index}/{max(1, status.range_count)}, not {index}/{leader.range_count}"
    if status.run_id != leader.run_id and status.parameter_count:  # without a model, it joins the run with the first worker
        return f"serves another run: {status.run_id}"
    return ""


def _with_the_runs_state(status: pb.GetStatusResponse | None, leader: pb.GetStatusResponse) -> pb.GetStatusResponse | None:
    """The status of a server of the leader's run. A server that follows does not know the run's state; the leader does."""
    if status is None or status.state != pb.RUN_STATE_FOLLOWING or leader.state not in _RUN_STATES:
        return status
    shown = pb.GetStatusResponse()
    shown.CopyFrom(status)
    shown.state = leader.state
    return shown


def lines(address: str, leader: pb.GetStatusResponse, others: Sequence[RangeState]) -> list[str]:
    """A line for each range and one for all together; none if there are no others."""
    if not others:
        return []
    states = [RangeState(0, address, leader), *others]
    return [_ROW.format(*COLUMNS), *(_ROW.format(*cells(state).values()) for state in states), total(states)]


def total(states: Sequence[RangeState]) -> str:
    """The sum of what all servers hold, of those that responded."""
    known = [state.status for state in states if state.status is not None]
    parameters, held = sum(each.parameter_count for each in known), sum(each.memory_bytes for each in known)
    missing = f", without {len(states) - len(known)} that did not respond" if len(known) < len(states) else ""
    return f"all    {parameters} parameters, memory {text.size(held)}{missing}"


def cells(state: RangeState) -> dict[str, str]:
    """A range's values by column."""
    own = state.status
    values = (own.version, own.parameter_count, text.memory(own), own.queue_length) if own else ("–",) * 4
    shown = state.trouble or (text.state(own) if own else "")
    texts = [str(state.index), state.address, *map(str, values), " ".join(shown.split())]
    return dict(zip(COLUMNS, map(printable, texts), strict=True))


def as_json(states: Sequence[RangeState]) -> list[dict[str, Any]]:
    """The other ranges' states for scripts: index, address, status (null if it did not respond) and trouble (empty if none)."""
    return [
        {
            "index": state.index,
            "address": state.address,
            "status": as_dict(state.status) if state.status is not None else None,
            "trouble": state.trouble,
        }
        for state in states
    ]
