"""A simulated server between two crashes: its state in memory, and what stands for its threads and its apply loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, NamedTuple, TypeVar

from gem_server.core.commits import Commit, Step
from gem_server.core.leases import Lease
from gem_server.core.releases import Releases
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.core.values import Header
from gem_server.durability.checkpointer import Checkpointer, Written
from gem_server.durability.log_file import LogFile
from gem_server.durability.write_order import Group, WriteOrder
from gem_server.intake.uploads import Uploads
from simulation.client import Request, Response

T = TypeVar("T")


@dataclass
class Arriving:
    """A commit whose gradient has arrived in part, or waits for its turn."""

    request: Request
    header: Header
    upload: Any  # or a future of one


@dataclass
class Plan:
    """What waits in the queue for its turn between two commits."""

    plan: Callable[[], Callable[[], Any]]
    result: Any = None
    done: bool = False

    def run(self) -> None:
        self.result, self.done = self.plan()(), True


@dataclass
class Release:
    """Held replies whose time has come. In the queue they wait for their turn, and then for the apply thread."""

    lease_ids: list[str]
    work: Callable[[], None] = lambda: None


class Waiter(NamedTuple):
    """A response that waits until a record is on the disk, and what its promise is."""

    response: Response
    told: Callable[[], object]


@dataclass
class Log:
    """The write-ahead log, and what stands for the threads that write it."""

    order: WriteOrder[Waiter]
    file: LogFile
    writing: Group | None = None
    written: list[Group] = field(default_factory=list)  # to be synced
    synced: list[Group] = field(default_factory=list)  # to be acknowledged


@dataclass
class Server:
    """The state that is lost with the process."""

    core: Core
    logged: bool = True  # whether this start keeps a log
    log: Log | None = None
    checkpointer: Checkpointer | None = None
    checkpoint: Coroutine[Any, Any, object] | None = None  # one that is being written
    jobs: list[tuple[Request, Coroutine[Any, Any, object]]] = field(default_factory=list)  # calls of other kinds that take long
    arriving: dict[str, Arriving] = field(default_factory=dict)
    ended: list[Upload] = field(default_factory=list)  # calls that were ended go on writing for a moment: a lane's threads
    uploads: Uploads = field(init=False)
    now: float = 0.0  # on the clock of the uploads
    queue: deque[Commit | Plan | Release] = field(default_factory=deque)
    step: Step | None = None
    releasing: Release | None = None
    releases: Releases = field(init=False)
    just_made: bool = False  # whether no commit was applied since a held reply was made
    held: dict[str, int] = field(default_factory=dict)  # the commit of each lease whose reply is held
    asked: dict[tuple[str, int], list[Request]] = field(default_factory=dict)  # who waits for which commit

    def __post_init__(self) -> None:
        """Every gradient needs a turn here, so that the small ones of the simulation wait too."""
        self.releases = Releases(self.core)
        self.uploads = Uploads(self.core.memory, Futures(), lambda: self.now, lambda: 2, small=0)  # type: ignore[arg-type]

    @property
    def busy(self) -> bool:
        """Whether the apply loop is between the beginning and the end of something."""
        return self.step is not None or self.releasing is not None


class Futures:
    """Stands for an event loop that makes futures."""

    def create_future(self) -> Future[Any]:
        return Future()


@coroutine
def later() -> Generator[None]:
    """Makes a checkpoint that is being written wait for its next step."""
    yield


async def in_thread(work: Callable[[], T]) -> T:
    await later()
    return work()


class BetweenCommits:
    """Stands for a server's apply loop."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def between_commits(self, plan: Callable[[], Callable[[], T]]) -> T:
        if not self._server.busy and not self._server.queue:
            return plan()()
        self._server.queue.append(turn := Plan(plan))
        while not turn.done:
            await later()
        return turn.result  # type: ignore[no-any-return]


class Turn:
    """Stands for an asyncio.Lock."""

    def __init__(self) -> None:
        self._taken = False

    async def __aenter__(self) -> None:
        while self._taken:
            await later()
        self._taken = True

    async def __aexit__(self, *exception: object) -> None:
        self._taken = False


class SimulatedCheckpointer(Checkpointer):
    """A server's checkpointer without an event loop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._one_at_a_time = Turn()  # type: ignore[assignment]

    async def write(self) -> Written:
        self.require_possible()
        return await self._write()


def waits_for_checkpoint(*leases: Lease) -> bool:
    """Whether a change of the leases' buffers would have to wait until a checkpoint has written them."""
    changes = [lease for lease in leases if lease.before_change is not None]
    if not changes:
        return False
    captured = getattr(changes[0].before_change, "__self__", None)
    assert captured is not None
    lacking = captured._scratch.lacking(sum(len(captured._unsaved.get(lease.lease_id, ())) for lease in changes))
    return lacking > 0 and not captured._core.memory.fits(captured._scratch.nbytes + lacking)
