"""Checkpoints and the end of a run that several servers hold together: each step on all ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from gem_api.errors import CheckpointFailed, GemError, InvalidRequest
from gem_api.v1 import admin_pb2 as pb
from gem_api.v1 import training_pb2

from gem_client.transport.channel import Stub, checked_address, open_channel
from gem_client.transport.security import Security

log = logging.getLogger("gem_client")
T = TypeVar("T")
_NO_CUT = pb.Cut(sequences={"": 0})  # no lease has this id


@dataclass(frozen=True)
class RangeServer:
    """The server of one range.

    Attributes:
        index: The range, from 0.
        address: The server's address.
        stub: Its RPCs.
    """

    index: int
    address: str
    stub: Stub


@contextmanager
def all_ranges(lead: Stub, status: training_pb2.GetStatusResponse, security: Security) -> Iterator[list[RangeServer]]:
    """The servers of all ranges of a run, in order, connected for the time of a `with` block. `status` is the lead's."""
    with ExitStack() as opened:
        servers = [RangeServer(0, lead.address, lead)]
        for index, address in enumerate(status.peers, 1):
            address = checked_address(address)
            channel = open_channel(address, security)
            opened.callback(channel.close)
            servers.append(RangeServer(index, address, Stub(channel, security.metadata, address)))
        yield servers


def checkpoint_all(
    servers: Sequence[RangeServer], run_id: str, quick: float, timeout: float
) -> tuple[list[pb.CreateCheckpointResponse], str]:
    """Writes a checkpoint over all ranges: each has the same commits of each worker. Commits go on while files are written.

    Args:
        servers: The servers of all ranges, in order.
        run_id: The run.
        quick: Seconds to wait for a response that needs no files.
        timeout: Seconds to wait for one that needs them.

    Returns:
        What each range has written, and the path of the manifest on the lead's machine.

    Raises:
        GemError: It failed at a range, which the message names. No range holds commits back then: one out of
            reach does so for 30 seconds at most. It can be tried again.
    """
    statuses = _each(servers, lambda server: _require_range(server, run_id, len(servers), quick))
    begun: list[RangeServer] = []

    def begin(server: RangeServer) -> pb.BeginCheckpointResponse:
        response: pb.BeginCheckpointResponse = server.stub.BeginCheckpoint(pb.BeginCheckpointRequest(), timeout=timeout)
        begun.append(server)
        return response

    try:
        taken = _each(servers, begin)
    except GemError:
        _release(begun, quick)
        raise
    cut = cut_of(response.taken for response in taken)
    log.info("checkpoint over %d ranges: commits of %d workers, each up to the same one", len(servers), len(cut.sequences))
    request = pb.CreateCheckpointRequest(cut=cut)
    written: list[pb.CreateCheckpointResponse] = _each(
        servers, lambda server: server.stub.CreateCheckpoint(request, timeout=timeout)
    )
    _require_one_age(written, statuses)
    for server, response in zip(servers, written, strict=True):
        log.info("range %d: version %d in %s on %s", server.index, response.version, response.path, server.address)
    return written, _write_manifests(servers, written, cut, timeout)


def cut_of(taken: Iterable[pb.Cut]) -> pb.Cut:
    """The cut: for each lease, the largest sequence that any range has taken. That commit is on its way to the others."""
    cut: dict[str, int] = {}
    for each in taken:
        for lease_id, sequence in each.sequences.items():
            cut[lease_id] = max(sequence, cut.get(lease_id, 0))
    return pb.Cut(sequences=cut)


def drain_all(servers: Sequence[RangeServer], timeout: float) -> int:
    """Shuts the servers of all ranges down; returns how many commits were queued.

    The lead comes last: it knows the others, so the command can be repeated until then. The order loses nothing: every range
    applies what is queued there, and a worker sends a commit again to the ranges that it has not reached once they are back.

    Raises:
        GemError: At least one range did not shut down; the message names the first one. All others do.
    """
    queued, failed = 0, None
    for server in [*servers[1:], servers[0]]:
        try:
            queued += server.stub.Drain(pb.DrainRequest(), timeout=timeout).queue_length
        except GemError as error:
            failed = failed or _named(server, error)
    if failed is not None:
        raise failed
    return queued


def _write_manifests(
    servers: Sequence[RangeServer], written: Sequence[pb.CreateCheckpointResponse], cut: pb.Cut, timeout: float
) -> str:
    """Has every range write the manifest, the lead last. Returns its path there.

    Until the lead has it, the others keep the checkpoints of older manifests too: if this program dies on the way, the lead's
    manifest is the one that is complete."""
    ranges = [
        pb.RangeCheckpoint(address=server.address, path=each.path, version=each.version, sha256=each.sha256)
        for server, each in zip(servers, written, strict=True)
    ]
    request = pb.WriteManifestRequest(ranges=ranges, cut=cut)
    _each(servers[1:], lambda server: server.stub.WriteManifest(request, timeout=timeout))
    path = str(_each(servers[:1], lambda server: server.stub.WriteManifest(request, timeout=timeout).path)[0])
    log.info("the checkpoints of all ranges belong together: %s on %s", path, servers[0].address)
    request.complete = True
    with suppress(GemError):  # a range that is away keeps its older checkpoints until the next manifest
        _each(servers[1:], lambda server: server.stub.WriteManifest(request, timeout=timeout))
    return path


def _release(servers: Sequence[RangeServer], timeout: float) -> None:
    """Ends the time in which servers hold commits back: they refuse an impossible cut, and commits go on."""
    for server in servers:
        with suppress(GemError):
            server.stub.CreateCheckpoint(pb.CreateCheckpointRequest(cut=_NO_CUT), timeout=timeout)


def most_apart(one: training_pb2.GetStatusResponse, other: training_pb2.GetStatusResponse) -> int:
    """By how many versions two ranges of a run may differ: by the commits that were cut short, with at most one for each
    lease and two for one that overlaps, and by those that one range rejected or discarded."""
    return sum(
        2 * (len(each.workers) + sum(each.leases_ended.values())) + each.commits["rejected"] + each.commits["discarded"]
        for each in (one, other)
    )


def _require_one_age(
    written: Sequence[pb.CreateCheckpointResponse], statuses: Sequence[training_pb2.GetStatusResponse]
) -> None:
    """Raises CheckpointFailed if the versions of ranges at one cut differ by more than workers can cause."""
    newest = max(range(len(written)), key=lambda index: written[index].version)
    for index, each in enumerate(written):
        if written[newest].version - each.version > most_apart(statuses[newest], statuses[index]):
            raise CheckpointFailed(
                f"the checkpoints do not belong together: range {index} is at version {each.version}, range {newest} at "
                f"{written[newest].version}. The folder of range {index} was probably replaced by an older copy: stop all "
                "servers, and make new folders for all ranges from the last manifest with `gem-ctl reshard`"
            )


def _require_range(server: RangeServer, run_id: str, count: int, timeout: float) -> training_pb2.GetStatusResponse:
    """The status of a server. Raises InvalidRequest unless it holds its range of the run."""
    status: training_pb2.GetStatusResponse = server.stub.GetStatus(training_pb2.GetStatusRequest(), timeout=timeout)
    known = status.run_id == run_id or not status.parameter_count  # without a model it has not joined the run yet
    if not known or (status.range_index, status.range_count) != (server.index, count):
        raise InvalidRequest(
            f"it holds range {status.range_index}/{status.range_count} of run {status.run_id}, not {server.index}/{count} of "
            f"{run_id}: check --peers of the lead"
        )
    return status


def _each(servers: Sequence[RangeServer], call: Callable[[RangeServer], T]) -> list[T]:
    """Calls all servers at once, and waits for all. Raises the first error, which then names its range."""
    with ThreadPoolExecutor(len(servers), "range") as threads:
        calls = [threads.submit(call, server) for server in servers]
    results, failed = [], None
    for server, each in zip(servers, calls, strict=True):
        try:
            results.append(each.result())
        except GemError as error:
            failed = failed or _named(server, error)
    if failed is not None:
        raise failed
    return results


def _named(server: RangeServer, error: GemError) -> GemError:
    """The same error, with the range in its message."""
    named: Any = type(error)(f"range {server.index} at {server.address}: {error}")
    log.warning("%s", named)
    assert isinstance(named, GemError)
    return named
