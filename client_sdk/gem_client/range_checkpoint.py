"""Checkpoints and the end of a run that several servers hold together: each step on all ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from gem_api.errors import CheckpointFailed, GemError, InvalidRequest
from gem_api.ranges import most_apart
from gem_api.v1 import admin_pb2 as pb
from gem_api.v1 import training_pb2

from gem_client.transport.channel import Stub, checked_address, open_channel
from gem_client.transport.security import Security

log = logging.getLogger("gem_client")
T = TypeVar("T")


@contextmanager
def all_ranges(leader: Stub, status: training_pb2.GetStatusResponse, security: Security) -> Iterator[list[Stub]]:
    """The servers of all ranges of a run, in order, connected for the time of a `with` block. `status` is the leader's."""
    with ExitStack() as opened:
        servers = [leader]
        for address in map(checked_address, status.peers):
            channel = open_channel(address, security)
            opened.callback(channel.close)
            servers.append(Stub(channel, security.metadata, address))
        yield servers


def checkpoint_all(servers: Sequence[Stub], run_id: str, quick: float, timeout: float) -> list[pb.CreateCheckpointResponse]:
    """Makes the server of each range write a checkpoint of its own, while commits go on. The leader copies its range first: so
    the others have all that it counts as done, and perhaps commits that came since.

    Args:
        servers: The servers of all ranges, in order.
        run_id: The run.
        quick: Seconds to wait for a response that needs no files.
        timeout: Seconds to wait for one that needs them.

    Returns:
        What each range has written.

    Raises:
        GemError: It failed at a range, which the message names. It can be tried again.
    """
    numbered = list(enumerate(servers))
    statuses = _each(numbered, lambda index, server: _require_range(server, run_id, index, len(servers), quick))

    def write(index: int, server: Stub) -> pb.CreateCheckpointResponse:
        response: pb.CreateCheckpointResponse = server.CreateCheckpoint(pb.CreateCheckpointRequest(), timeout=timeout)
        return response

    written = [*_each(numbered[:1], write), *_each(numbered[1:], write)]
    _require_none_older(written, statuses)
    for (index, server), response in zip(numbered, written, strict=True):
        log.info("range %d: version %d in %s on %s", index, response.version, response.path, server.address)
    return written


def drain_all(servers: Sequence[Stub], timeout: float) -> int:
    """Shuts the servers of all ranges down; returns how many commits were queued.

    The leader comes last: it knows the others, so the command can be repeated until then. The order loses nothing: every range
    applies what is queued there, and a worker sends a commit again to the ranges that it has not reached once they are back.

    Raises:
        GemError: At least one range did not shut down; the message names the first one. All others do.
    """
    queued, failed = 0, None
    leader, *others = enumerate(servers)
    for index, server in [*others, leader]:
        try:
            queued += server.Drain(pb.DrainRequest(), timeout=timeout).queue_length
        except GemError as error:
            failed = failed or _named(index, server, error)
    if failed is not None:
        raise failed
    return queued


def ranges_apart(*ranges: training_pb2.GetStatusResponse) -> int:
    """As `gem_api.ranges.most_apart`, of two ranges with these statuses."""
    return most_apart(
        sum(len(each.workers) + sum(each.leases_ended.values()) for each in ranges),
        sum(each.commits["rejected"] + each.commits["discarded"] for each in ranges),
    )


def _require_none_older(
    written: Sequence[pb.CreateCheckpointResponse], statuses: Sequence[training_pb2.GetStatusResponse]
) -> None:
    """Raises CheckpointFailed if a range is older than the leader, copied before it, by more than workers can cause."""
    for index, each in enumerate(written):
        if written[0].version - each.version > ranges_apart(statuses[0], statuses[index]):
            raise CheckpointFailed(
                f"the checkpoints do not belong together: range {index} is at version {each.version}, range 0 at "
                f"{written[0].version}. The folder of range {index} was probably replaced by an older copy: stop all "
                "servers, and make new folders for all ranges from one backup with `gem-ctl reshard`"
            )


def _require_range(server: Stub, run_id: str, index: int, count: int, timeout: float) -> training_pb2.GetStatusResponse:
    """The status of a server. Raises InvalidRequest unless it holds this range of the run."""
    status: training_pb2.GetStatusResponse = server.GetStatus(training_pb2.GetStatusRequest(), timeout=timeout)
    known = status.run_id == run_id or not status.parameter_count  # without a model it has not joined the run yet
    if not known or (status.range_index, status.range_count) != (index, count):
        raise InvalidRequest(
            f"it holds range {status.range_index}/{status.range_count} of run {status.run_id}, not {index}/{count} of "
            f"{run_id}: check --peers of the lead"
        )
    return status


def _each(servers: Sequence[tuple[int, Stub]], call: Callable[[int, Stub], T]) -> list[T]:
    """Calls all servers at once, and waits for all. Raises the first error, which then names its range."""

    def named(index: int, server: Stub) -> T:
        try:
            return call(index, server)
        except GemError as error:
            raise _named(index, server, error) from None

    with ThreadPoolExecutor(len(servers), "range") as threads:
        calls = [threads.submit(named, index, server) for index, server in servers]
    return [each.result() for each in calls]


def _named(index: int, server: Stub, error: GemError) -> GemError:
    """The same error, with the range in its message."""
    named: Any = type(error)(f"range {index} at {server.address}: {error}")
    log.warning("%s", named)
    assert isinstance(named, GemError)
    return named
