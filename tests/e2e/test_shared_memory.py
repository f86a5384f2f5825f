"""Shared memory between real processes, killed in every way: no mapping, file or socket outlives the processes that use it."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_api.v1 import lane_pb2
from gem_client import Admin, GemError, connect
from kit.ports import free_address
from kit.process import PATIENCE, Process, Start, processes
from kit.raw_client import Wire
from kit.raw_lane import HELLO, committed, message, offer, opened_in_memory, unix
from kit.regions import linux_only, mapped, region_at
from kit.server import wait_until
from kit.settings import configured

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), linux_only]
SIZE = 100_000

# Commits, with pauses that leave some of the machine to others, until the server has been away for a while.
WORKER = """
import sys, threading
import numpy
from gem_client import Retry, TransportError, connect
try:
    with connect(sys.argv[1], name=sys.argv[2], retry=Retry(give_up_after=float(sys.argv[3]))) as session:
        session.join({"w": numpy.zeros(%d)})
        while True:
            session.commit(numpy.full(%d, 0.001))
            threading.Event().wait(0.005)
except TransportError:
    pass
""" % (SIZE, SIZE)  # noqa: UP031


class Server(Process):
    """A gem-server on a free port."""

    def __init__(self, output: Path, *flags: str) -> None:
        common = ("--listen", free_address(), "--metrics-listen", "", "--epochs", "100000")
        super().__init__(output, "-m", "gem_server", *common, *flags)

    def status(self) -> Any:
        with Admin(self.address, timeout=10.0) as admin:
            return admin.status()

    def until_trained(self, commits: int, *names: str) -> None:
        """Waits until exactly these workers are in the run, each with so many commits through shared memory."""

        def trained() -> bool:
            assert self.alive, self.output
            with suppress(GemError):
                workers = {worker.name: worker for worker in self.status().workers}
                return workers.keys() == set(names) and all(
                    worker.transport == "memory" and worker.commits >= commits for worker in workers.values()
                )
            return False

        wait_until(trained, f"{commits} commits of {names} through memory", PATIENCE)

    def until_it_maps(self, *inodes: str) -> None:
        """Waits until it maps these regions and no others."""

        def right() -> bool:
            assert self.alive, self.output
            return sorted(mapped(self.pid)) == sorted(inodes)

        wait_until(right, f"the server to map {inodes}", PATIENCE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with processes(tmp_path) as begin:
        yield begin


def worker(output: Path, address: str, name: str, give_up_after: str = "60") -> Process:
    return Process(output, "-c", WORKER, address, name, give_up_after)


def region_of(process: Process) -> str:
    """The inode of the one region that a worker's process maps."""
    (inode,) = wait_until(lambda: mapped(process.pid), "the worker to map its region", PATIENCE)
    return str(inode)


def mapping_processes(inode: str) -> list[int]:
    """Every process of this machine that maps a region."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if inode in mapped(entry.name):
                found.append(int(entry.name))
    return found


def shared_files() -> list[str]:
    """What could have been left behind in the machine's own tmpfs."""
    return [name for name in os.listdir("/dev/shm") if "gem" in name]


# -- as it comes


def test_server_and_worker_share_memory_by_default(start: Start) -> None:
    """The commands with no flags but addresses: what a user starts is what is fast."""
    server = start(Server)
    trainer = start(Process, "-m", "gem_worker", "--server", server.address, "--name", "ann")
    server.until_trained(5, "ann")
    region = region_of(trainer)
    server.until_it_maps(region)
    assert trainer.end() == 0, trainer.output
    server.until_it_maps()
    assert mapping_processes(region) == []
    assert server.end() == 0, server.output


# -- kill -9


def test_a_killed_workers_region_is_gone_when_its_lease_is_and_the_others_go_on(start: Start) -> None:
    server = start(Server, configured(lease_seconds=5))
    victim, other = start(worker, server.address, "victim"), start(worker, server.address, "other")
    server.until_trained(5, "victim", "other")
    doomed, kept = region_of(victim), region_of(other)
    server.until_it_maps(doomed, kept)
    victim.kill()
    server.until_it_maps(kept)
    assert mapping_processes(doomed) == []
    done = next(one.commits for one in server.status().workers)
    server.until_trained(done + 5, "other")
    assert shared_files() == []


@pytest.mark.parametrize("place", ["path", "auto"])
def test_a_killed_server_leaves_nothing_and_another_takes_its_place(place: str, start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = (configured(memory_socket=str(path) if place == "path" else "auto"),)
    server = start(Server, *flags)
    orphan = start(worker, server.address, "ann", "1")
    server.until_trained(5, "ann")
    region = region_of(orphan)
    server.kill()
    assert set(mapping_processes(region)) <= {orphan.pid}
    assert orphan.wait() == 0, orphan.output
    assert mapping_processes(region) == []
    assert shared_files() == []
    assert path.is_socket() == (place == "path")  # all that is left

    again = start(Server, *flags)
    start(worker, again.address, "ann")
    again.until_trained(5, "ann")
    assert again.end() == 0, again.output
    assert not path.exists()


def test_a_worker_goes_on_by_reference_with_a_server_that_was_killed_and_resumed(start: Start, tmp_path: Path) -> None:
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--resume", configured(checkpoint_interval=0.2))
    first = start(Server, *flags)
    address = first.address
    faithful = start(worker, address, "ann")
    first.until_trained(20, "ann")
    old = region_of(faithful)
    first.kill()
    second = start(Server, "--listen", address, *flags)
    second.until_trained(5, "ann")
    # The lease that the server restored may have ended at once, because commits were lost. Its region goes soon after.
    (new,) = wait_until(lambda: (found := mapped(second.pid)) and len(found) == 1 and found, "one region", PATIENCE)
    assert new != old
    assert sorted(mapping_processes(new)) == sorted([faithful.pid, second.pid])


# -- hostile neighbours


def test_a_worker_can_not_take_the_memory_away_from_under_the_server(start: Start) -> None:
    """An access to memory that was cut off would end the server by SIGBUS."""
    server = start(Server)
    wire = Wire(server.address)
    raw = wire.started("raw")
    offered = offer(raw)
    with unix(offered.socket) as lane:
        lane.send(message(HELLO, lane_pb2.LaneHello(token=offered.token).SerializeToString()))
        _, (descriptor,), _, _ = socket.recv_fds(lane.sock, 4096, 1)
        for size in (0, 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        os.close(descriptor)
    with opened_in_memory(raw) as lane:
        assert committed(raw, lane)[0].version == 1
        assert lane.gradient is not None
        server.until_it_maps(region_at(lane.gradient))
    raw.leave()
    server.until_it_maps()
    wire.close()


def descriptors(process: Process) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}


def test_a_server_with_no_descriptor_left_for_a_visitor_goes_on(start: Start) -> None:
    """Whoever reaches the socket may use up descriptors: that may cost shared memory for a while, but not the run."""
    server = start(Server)
    start(worker, server.address, "ann")
    server.until_trained(5, "ann")
    wire = Wire(server.address)
    address = offer(wire.join("visitor", Layout.of({"w": (SIZE,)}))).socket
    soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    with ExitStack() as visitors, Admin(server.address, timeout=10.0) as admin:
        done = admin.status().version
        limit = max(descriptors(server)) + 3
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, hard))
        for _ in range(60):
            with suppress(ConnectionRefusedError):
                visitors.enter_context(unix(address))
        wait_until(lambda: not server.alive or len(descriptors(server)) >= limit, "every descriptor to be taken", PATIENCE)
        assert server.alive, server.output
        wait_until(lambda: admin.status().version > done + 20, "the run to go on meanwhile", PATIENCE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
    wire.close()
    assert server.alive, server.output
    with connect(server.address) as late:
        late.join({"w": np.zeros(SIZE)})
        assert late.shares_memory
