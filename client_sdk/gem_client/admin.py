"""`Admin`: reads and controls a run, for operators' tools and evaluators."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from gem_api.errors import InvalidRequest
from gem_api.v1 import admin_pb2
from gem_api.v1 import training_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gem_client.range_checkpoint import all_ranges, checkpoint_all, drain_all
from gem_client.transport.channel import Stub, checked_address, next_frame, open_channel, typed
from gem_client.transport.security import Security, Source, or_that_of_dry_run


class Admin:
    """A connection to a server that reads and controls the run, but does not train. Use it as a context manager.

    Every method raises a GemError if the server is unreachable or rejects the request. Nothing is retried.

    Args:
        address: The server's address, "host:port", as for `connect`.
        timeout: Seconds to wait for each response.
        token: The access token, as for `connect`.
        tls_ca: PEM file with the certificate authorities to trust, as for `connect`.
        tls_cert: PEM file with this client's certificate, as for `connect`.
        tls_key: PEM file with the private key of `tls_cert`, as for `connect`.

    Raises:
        InvalidRequest: `address` or the token is malformed, a file can't be read, or the TLS arguments do not go together.
    """

    def __init__(
        self,
        address: str,
        timeout: float = 10.0,
        *,
        token: str | None = None,
        tls_ca: Source | None = None,
        tls_cert: Source | None = None,
        tls_key: Source | None = None,
    ) -> None:
        given = checked_address(address), Security(token, tls_ca, tls_cert, tls_key)
        address, self._security = or_that_of_dry_run(*given)
        self._channel = open_channel(address, self._security)
        self._stub = Stub(self._channel, self._security.metadata, address)
        self._health = typed(health_pb2_grpc.HealthStub(self._channel).Check, address)
        self._timeout = timeout

    def status(self, *, curves: bool = False) -> pb.GetStatusResponse:
        """Returns the state of the run: version, workers, shards, hyperparameters, memory and more; with `curves`, also the
        curves of the whole run."""
        response: pb.GetStatusResponse = self._stub.GetStatus(pb.GetStatusRequest(curves=curves), timeout=self._timeout)
        return response

    def healthy(self) -> bool:
        """Whether the server is healthy; False while it shuts down (`grpc.health.v1`)."""
        response: health_pb2.HealthCheckResponse = self._health(health_pb2.HealthCheckRequest(), timeout=self._timeout)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def checkpoint(self, timeout: float = 600.0) -> admin_pb2.CreateCheckpointResponse:
        """Makes the server write a checkpoint, and waits up to `timeout` seconds for it. As `checkpoint_all`, which also
        returns what the servers of other ranges have written."""
        return self.checkpoint_all(timeout)[0]

    def checkpoint_all(self, timeout: float = 600.0) -> list[admin_pb2.CreateCheckpointResponse]:
        """Makes the servers of all ranges write a checkpoint each, and waits up to `timeout` seconds for each. Returns what
        they have written, in the order of the ranges; a single server holds one.

        The server must be the one that leads. Its checkpoint has the run's counts, and it copies its range before the others:
        they have all that it counts as done, and perhaps commits that came since. The others must be reachable from here, with
        the same credentials. An error names the range that failed. Raises InvalidRequest if this server does not lead.
        """
        status = self._status_of_leader()
        if status.peers:
            with all_ranges(self._stub, status, self._security) as servers:
                return checkpoint_all(servers, status.run_id, self._timeout, timeout)
        return [self._stub.CreateCheckpoint(admin_pb2.CreateCheckpointRequest(), timeout=timeout)]

    def read_checkpoint(self, path: str) -> Iterator[tuple[str, bytes]]:
        """Reads the files of a checkpoint that this server has written: state.json, then the others. Yields the name of a file
        and its next bytes, at most 1 MiB.

        From the first bytes on, the server may remove the checkpoint: it has all files open. It sends as fast as they are read.

        Args:
            path: The checkpoint's folder, as `checkpoint` returns it.

        Raises:
            CheckpointFailed: The server has no such checkpoint, or not any more.
        """
        frames = self._stub.ReadCheckpoint(admin_pb2.ReadCheckpointRequest(path=path))
        try:
            while (frame := next_frame(frames, self._stub.address)) is not None:
                piece = admin_pb2.ReadCheckpointResponse.FromString(frame)
                yield piece.file, piece.data
        finally:
            frames.cancel()

    def drain(self) -> int:
        """Makes the server apply the queued commits, write a checkpoint and exit; returns how many commits were queued.

        If several servers hold the model and this one leads, all of them do so, the leader last. If one can't be reached, the
        others still exit, and the error names it. Raises InvalidRequest if this server does not lead.
        """
        status = self._status_of_leader("; to stop this one alone, send it SIGTERM")
        if status.peers:
            with all_ranges(self._stub, status, self._security) as servers:
                return drain_all(servers, self._timeout)
        response: admin_pb2.DrainResponse = self._stub.Drain(admin_pb2.DrainRequest(), timeout=self._timeout)
        return response.queue_length

    def _status_of_leader(self, otherwise: str = "") -> pb.GetStatusResponse:
        """The status. Raises InvalidRequest if another server leads: only that one knows all ranges."""
        status = self.status()
        if status.range_index:
            raise InvalidRequest(
                f"this server holds range {status.range_index} of {status.range_count} and does not lead: ask the server of "
                f"range 0, which does this on all of them{otherwise}"
            )
        return status

    def quarantine(self) -> list[admin_pb2.QuarantinedWorker]:
        """Returns the quarantined workers, whose gradients were rejected too often; the longest quarantined first."""
        response: admin_pb2.ListQuarantineResponse = self._stub.ListQuarantine(
            admin_pb2.ListQuarantineRequest(), timeout=self._timeout
        )
        return list(response.workers)

    def lift_quarantine(self, worker: str) -> None:
        """Lets a worker register again. Raises InvalidRequest if it is not in quarantine."""
        self._stub.LiftQuarantine(admin_pb2.LiftQuarantineRequest(worker_name=worker), timeout=self._timeout)

    def report_evaluation(self, version: int, loss: float, accuracy: float | None = None) -> None:
        """Reports the result of an evaluation on held-out data.

        Args:
            version: The version of θ that was evaluated.
            loss: The loss.
            accuracy: The fraction of correct predictions, 0 to 1, if there is one.
        """
        report = pb.ReportEvaluationRequest(version=version, loss=loss, accuracy=accuracy)
        self._stub.ReportEvaluation(report, timeout=self._timeout)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
