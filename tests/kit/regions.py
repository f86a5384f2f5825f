"""A worker's shared memory and its lane, for tests; and functions that ask Linux which processes map regions."""

from __future__ import annotations

import gc
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb

from kit.raw_client import SMALL, Theta, Wire, Worker, wired
from kit.raw_lane import LaneFailed, RawLane, header, hello, offer, unix
from kit.server import Live, config, serving, wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's memfd")
PAGE = 4096
REGION = "memfd:gem-region"
# Large enough that the pass runs in the apply thread, beside the event loop; no multiple of a page.
LARGE = Layout.of({"w": (300, 1001), "b": (7,)})
RULES = {
    "gem, after": Hyperparameters(),
    "gem, paper": Hyperparameters(snapshot="paper"),
    "gem, reference": Hyperparameters(snapshot="reference", epsilon=1e-12),
    "downpour": Hyperparameters(rule="downpour"),
    "adaptive": Hyperparameters(rule="adaptive"),
}


def abstract() -> str:
    """A name for a memory socket that no other test uses."""
    return f"@gem-test-{secrets.token_hex(8)}"


def handed_over(lane: RawLane) -> int | None:
    """The descriptor that comes with the server's welcome, or None if it refuses the lane. Closes the connection."""
    with lane:
        try:
            return lane.welcomed()
        except (LaneFailed, EOFError, ConnectionResetError):
            return None


def visit(address: str, *said: bytes) -> RawLane:
    """Connects to the lane's Unix socket, and sends these bytes."""
    lane = unix(address)
    try:
        lane.send(*said)
    except BaseException:
        lane.close()
        raise
    return lane


def asked(worker: Worker) -> RawLane:
    """A connection that has said what gives the worker its region, with nothing read yet."""
    offered = offer(worker)
    return visit(offered.socket, hello(offered.token))


def fetched(worker: Worker) -> Shared | None:
    """The worker's region; None if the server gives none."""
    lane = asked(worker)
    try:
        return Shared(worker, lane, lane.welcomed())
    except (LaneFailed, EOFError, ConnectionResetError):
        lane.close()
        return None


def shared(worker: Worker) -> Shared:
    """The worker's region."""
    region = fetched(worker)
    assert region is not None, "the server handed over no memory"
    return region


class Shared:
    """A region mapped by its worker, and the lane that came with it.

    Attributes:
        gradient: float32, shape (P,).
        answer: float32, shape (P,).
        memory: All of it.
        inode: The file's: what to look for in a process's maps.
        lane: The lane; a new one is opened if the server has ended it.
    """

    def __init__(self, worker: Worker, lane: RawLane, descriptor: int) -> None:
        """Closes the descriptor."""
        self.worker = worker
        self.lane = lane
        self.inode = str(os.fstat(descriptor).st_ino)
        pages = -(-4 * worker.size // PAGE) * PAGE
        self.memory = mmap.mmap(descriptor, PAGE + 2 * pages)
        os.close(descriptor)
        self.gradient: Theta = np.frombuffer(self.memory, "<f4", worker.size, PAGE)
        self.answer: Theta = np.frombuffer(self.memory, "<f4", worker.size, PAGE + pages)

    def sent(self, **changes: Any) -> RawLane:
        """Sends the header of the worker's next commit, with some fields changed, on a lane that replaces the last one."""
        offered = offer(self.worker)
        lane = unix(offered.socket)
        lane.send(hello(offered.token))
        descriptor = lane.welcomed()
        assert str(os.fstat(descriptor).st_ino) == self.inode, "a lease has one region"
        os.close(descriptor)
        self.lane.close()
        self.lane = lane
        return self.sent_on(**changes)

    def sent_on(self, **changes: Any) -> RawLane:
        """As `sent`, on the same lane as before."""
        self.lane.commit(header(self.worker, **changes))
        return self.lane

    def commit(self, value: float = 1.0) -> tuple[pb.CommitResult, Theta]:
        """One valid commit of a gradient whose elements are all `value`."""
        self.gradient[:] = value
        return self.worker.took(self.answered(self.sent()))

    def answered(self, lane: RawLane) -> tuple[pb.CommitResult, Theta]:
        """The result of a commit, and the θ in the region after it."""
        result, theta = lane.answer()
        assert theta.size == 0, "no tensor travels on the lane"
        return result, self.answer.copy()

    def unmap(self) -> None:
        """Gives the memory back, and keeps the lane."""
        del self.gradient, self.answer, self.memory

    def close(self) -> None:
        """Drops the worker's side of it."""
        self.lane.close()
        self.unmap()


@contextmanager
def sharing(settings: Hyperparameters | None = None, layout: Layout = SMALL) -> Iterator[tuple[Live, Wire, Worker, Shared]]:
    """A server with these settings, and its first worker with its region."""
    with serving(config(settings, memory_socket=abstract())) as live, wired(live) as wire:
        worker = wire.started("worker", layout)
        region = shared(worker)
        yield live, wire, worker, region
        region.close()


@contextmanager
def all_the_time(work: Callable[[], object]) -> Iterator[None]:
    """Calls `work` again and again in a thread, until the block ends."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# -- inside the server


def queue_length(live: Live) -> int:
    """Number of commits in the queue."""
    length: int = live.on_loop(lambda: live.server.wiring.apply_loop.queue_length)
    return length


def theta_of(live: Live) -> Theta:
    """A copy of the central variable: float32, shape (P,)."""
    theta: Theta = live.on_loop(lambda: live.core.central.theta.copy())
    return theta


def memory_bytes(live: Live) -> int:
    return int(live.on_loop(lambda: live.core.memory.held))


def shares(worker: Worker) -> bool:
    """Whether the server has a region for the worker now."""
    region = fetched(worker)
    if region is not None:
        region.close()
    return region is not None


def expired(live: Live, worker: Worker) -> None:
    live.clock.advance(live.config.lease_seconds + 1)
    wait_until(lambda: live.on_loop(lambda: worker.lease_id not in live.core.leases.live), "the lease to expire")


ENDS: dict[str, Callable[[Live, Worker], object]] = {
    "left": lambda live, worker: worker.leave(),
    "replaced": lambda live, worker: worker.wire.join("worker"),
    "expired": expired,
}


# -- what is left behind


def mapped(process: int | str = "self") -> list[str]:
    """The inode of each region that a process maps, once for each mapping; this process ("self") once garbage is collected."""
    if process == "self":
        gc.collect()
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line.split()[4] for line in maps if REGION in line]


def region_at(array: Theta) -> str:
    """The inode of the region of this process that an array lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if begin <= array.ctypes.data < end:
            assert REGION in line, line
            return line.split()[4]
    raise AssertionError("no mapping holds the array")


def held_open(process: int | str = "self") -> list[str]:
    """The inode of each region that a process holds a descriptor of, once for each."""
    inodes = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            if REGION in os.readlink(entry):
                inodes.append(str(entry.stat().st_ino))
    return inodes


def regions_bytes() -> int:
    """Total bytes of the regions that this process has open, each counted once."""
    gc.collect()
    taken = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if REGION in os.readlink(entry):
                file = entry.stat()
                taken[file.st_ino] = 512 * file.st_blocks
    return sum(taken.values())


def until_held(inode: str, times: int) -> None:
    """Waits until this process maps a region the given number of times, and has at most one descriptor more than mappings.

    A mapping of Python's keeps one descriptor of its own, and the server keeps one for as long as anybody maps the region.
    """
    what = f"region {inode} to be mapped {times} times"
    wait_until(lambda: mapped().count(inode) == times and held_open().count(inode) <= times + (times > 0), what)
