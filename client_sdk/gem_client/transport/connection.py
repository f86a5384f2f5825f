"""A worker's calls to the server, one attempt each. The callers retry, by `Retry.call`."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import numpy.typing as npt
from gem_api.errors import Draining, GemError, InvalidRequest, LeaseEnded, ServerUnavailable
from gem_api.formats import outdated
from gem_api.framing import parse_frame
from gem_api.hyperparameters import NO_AVERAGE
from gem_api.layout import Vector
from gem_api.process.lifetime import where_threads_stand
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, ThetaFormat

from gem_client.transport.background import Background
from gem_client.transport.channel import Stub, checked_address, next_frame, open_channel, typed_error
from gem_client.transport.commit_stream import CommitStream, noting, receive_chunks
from gem_client.transport.lane import Lane, open_memory_lane, open_network_lane
from gem_client.transport.security import Security
from gem_client.transport.theta_receiver import IN_FLOAT32, ThetaReceiver

log = logging.getLogger("gem_client")


class Standing:
    """What the links of a session know of it.

    Attributes:
        stalled: The id of the lease that the server has ended because the worker no longer trained; empty if there is none. No
            link renews it.
    """

    def __init__(self) -> None:
        self.stalled = ""
        self._calls = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether a call of the session is under way, retries and the pauses between them included."""
        return self._calls > 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The time of a call."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1


class Connection:
    """A worker's calls to the server. Each raises a GemError if it fails.

    A lease's commits travel by the first of these that works: shared memory, the lane over TCP, gRPC. This is chosen when the
    lease begins. If a lane breaks, it is chosen again under the same lease, and the pending commit is sent again with its
    sequence, so that nothing is lost or applied twice. gRPC takes over only if it answers while no lane can be opened: if it
    does not answer either, the server is away, and the call is retried. What breaks twice without a commit in between is given
    up: lanes that open and then break, for gRPC; and gRPC, for a new choice, because the server or the network was away.

    Args:
        address: The server's "host:port".
        timeout: Seconds that a unary call may take, and seconds without progress that a streaming call may take.
        security: The token and the TLS files.

    Attributes:
        lane: The open lane; None: commits go over gRPC.
        chosen: Whether that is what the next commit uses; else `open_lane` comes first.
    """

    def __init__(self, address: str, timeout: float, security: Security) -> None:
        address = checked_address(address)
        self._channel = open_channel(address, security)
        self._stub = Stub(self._channel, security.metadata, address)
        self._timeout = timeout
        self._background = Background(weakref.WeakMethod(self.renew), timeout)
        self._lease_id = ""  # id of the lease that is renewed in the background; empty if there is none
        self._renew_timeout = timeout
        self._standing = Standing()
        self._stream: CommitStream | None = None
        self.lane: Lane | None = None
        self.chosen = False
        self._broke = False  # whether the last attempt to commit did
        self._security = security
        self._stopped = False

    def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        response: pb.RegisterWorkerResponse = self._stub.RegisterWorker(request, timeout=self._timeout)
        if old := outdated("the server", response.contract, response.release):
            log.warning("%s", old)
        return response

    def keep_alive(self, lease_id: str, seconds: float, standing: Standing) -> None:
        """Renews this lease every `seconds` seconds from now on, in the background, until `leave` or `stop`, or until the
        worker is stalled."""
        self._standing = standing
        self._lease_id = lease_id
        self._renew_timeout = min(self._timeout, max(1.0, seconds))  # a renewal that hangs leaves time for another
        self._background.start(seconds)

    def renew(self) -> None:
        """Renews the lease of `keep_alive`, once: on its lane if that is free, else over gRPC."""
        lane, lease_id, standing = self.lane, self._lease_id, self._standing
        waiting = standing.waiting
        if not lease_id or standing.stalled == lease_id or (lane is not None and not waiting and lane.renew()):
            return
        try:
            self._stub.RenewLease(pb.RenewLeaseRequest(lease_id=lease_id, waiting=waiting), timeout=self._renew_timeout)
        except LeaseEnded as ended:
            if ended.reason == "stalled":
                standing.stalled = lease_id
                log.error(
                    "the server ended the lease: this worker renewed it, but for far longer than usual in this run it asked "
                    "for nothing that training needs. It registers again if it goes on. Its threads stand at: %s",
                    "; ".join(f"{name}: {calls}" for name, calls in where_threads_stand(but="gem-session").items()),
                )
            raise

    def leave(self, lease_id: str, timeout: float) -> None:
        """Leaves the run. The lease is renewed no more, even if the call fails."""
        self._lease_id = ""
        self._stub.LeaveCluster(pb.LeaveClusterRequest(lease_id=lease_id), timeout=timeout)

    def lease_shard(self, lease_id: str, samples: int, holding: Collection[int], fingerprint: bytes) -> pb.LeaseShardResponse:
        request = pb.LeaseShardRequest(
            lease_id=lease_id, sample_count=samples, holding=sorted(holding), samples_fingerprint=fingerprint
        )
        response: pb.LeaseShardResponse = self._stub.LeaseShard(request, timeout=self._timeout)
        return response

    def status(self, timeout: float | None = None, *, curves: bool = False) -> pb.GetStatusResponse:
        """Reads the run's state, with `curves` also its curves. `timeout` takes the place of the connection's."""
        request = pb.GetStatusRequest(curves=curves)
        response: pb.GetStatusResponse = self._stub.GetStatus(request, timeout=self._timeout if timeout is None else timeout)
        return response

    def report_evaluation(self, report: pb.ReportEvaluationRequest) -> None:
        self._stub.ReportEvaluation(report, timeout=self._timeout)

    def complete_shard(self, lease_id: str, shard_id: int) -> bool:
        request = pb.CompleteShardRequest(lease_id=lease_id, shard_id=shard_id)
        response: pb.CompleteShardResponse = self._stub.CompleteShard(request, timeout=self._timeout)
        return response.accepted

    def initialize(self, lease_id: str, theta: Vector) -> None:
        """Sends θ's first value (float32, shape (P,))."""
        opening = pb.InitializeCentralRequest(header=pb.InitializeCentralHeader(lease_id=lease_id)).SerializeToString()
        frames = FLOAT32.frames(theta, opening)
        with self._background.watching(lambda: call.cancel()) as progress:
            call = self._stub.InitializeCentral(noting(progress, frames))
            try:
                call.result()
            except grpc.RpcError as error:
                raise typed_error(error, self._stub.address) from None
            except grpc.FutureCancelledError:
                raise ServerUnavailable(f"the server received nothing for {self._timeout:g} s") from None

    def pull(
        self, lease_id: str, make_buffer: Callable[[pb.PullHeader], Vector], theta_format: ThetaFormat = FLOAT32,
        average: bool = False,
    ) -> pb.PullHeader:  # fmt: skip
        """Reads θ, or its average, into the buffer that `make_buffer` returns: float32, shape (P,). Reads nothing if θ has no
        value yet. Raises InvalidRequest if the average is asked for and there is none."""
        call = self._stub.Pull(pb.PullRequest(lease_id=lease_id, theta_dtype=theta_format.dtype, average=average))
        with self._background.watching(call.cancel) as progress:
            frame = next_frame(call, self._stub.address)
            header, chunk = parse_frame(frame, pb.PullResponse) if frame is not None else (None, None)
            if header is None:
                raise ServerUnavailable("the server sent no header")
            if average and not header.average:  # from a server of an earlier release
                raise InvalidRequest(NO_AVERAGE)
            if not header.must_initialize:
                receive_chunks(chunk, call, pb.PullResponse, theta_format.assembly(make_buffer(header)), progress)
        pulled: pb.PullHeader = header
        return pulled

    # -- commits

    def open_lane(self, lease_id: str, parameters: int, in_memory: bool) -> None:
        """Chooses how the commits of a lease travel, with P parameters. Opens a lane if the server has one: with shared memory
        if that is wanted and the server is on this machine, else over TCP. If neither can be opened, they go over gRPC.

        Raises GemError if the server does not answer or shuts down, or if the lease has ended.
        """
        lane = self._try_lanes(lease_id, parameters, in_memory)
        self.lane, self.chosen = lane, True
        if self._stopped:  # by another thread, which did not see this lane
            self.drop_stream()
            raise ServerUnavailable("the connection was closed")

    def _try_lanes(self, lease_id: str, parameters: int, in_memory: bool) -> Lane | None:
        failures: list[str] = []
        for is_memory in (True, False) if in_memory else (False,):
            try:
                offer = self._stub.OpenLane(pb.OpenLaneRequest(lease_id=lease_id), timeout=self._timeout)
            except InvalidRequest as error:
                log.info("commits go over gRPC: %s", error)
                return None
            try:
                lane = (
                    open_memory_lane(offer, parameters, self._timeout)
                    if is_memory
                    else open_network_lane(offer, self._stub.address, self._security, self._timeout)
                )
            except (Draining, LeaseEnded):
                raise  # another lane would not help
            except (GemError, OSError) as error:
                failures.append(str(error))
                continue
            if failures:
                log.info("no shared memory with the server, so commits go over TCP: %s", failures[0])
            return lane
        log.warning("commits go over gRPC, which is slower: can't open a lane (%s)", "; ".join(failures))
        return None

    @property
    def transport(self) -> str:
        """How commits travel: "memory", "tcp", "tls" or "grpc"."""
        return self.lane.transport if self.lane is not None else "grpc"

    def commit_on_lane(
        self,
        header: pb.CommitHeader,
        nbytes: int = 0,
        pieces: Iterable[npt.NDArray[np.uint8]] = (),
        theta: Vector | None = None,
        receiver: ThetaReceiver = IN_FLOAT32,
    ) -> pb.CommitResult:
        """Makes one exchange on the open lane. See `Lane.exchange`."""
        lane = self.lane
        if lane is None:
            raise ServerUnavailable("the connection was closed")  # by another thread
        try:
            result = lane.exchange(header, nbytes, pieces, theta, receiver)
        except BaseException as error:
            self.chosen = self._broke_again(error)
            if self.chosen:
                log.warning("commits go over gRPC, which is slower: lanes open and then break (%s)", error)
            raise
        self._broke = False
        return result

    def commit_on_stream(self, frames: Iterable[bytes], theta: Vector, receiver: ThetaReceiver) -> pb.CommitResult:
        """Sends a commit on the open stream, or opens one, and receives θ. See `CommitStream.exchange`."""
        self._stream = stream = self._stream or CommitStream(self._stub)
        try:
            with self._background.watching(stream.cancel) as progress:
                result = stream.exchange(frames, theta, receiver, progress)
        except BaseException as error:
            self.chosen = not self._broke_again(error)
            raise
        self._broke = False
        return result

    def _broke_again(self, error: BaseException) -> bool:
        """Ends what a commit has failed on. Returns whether it broke, and the one before too, with no commit in between."""
        self.drop_stream()
        before, self._broke = self._broke, isinstance(error, ServerUnavailable)
        return before and self._broke

    def drop_stream(self) -> None:
        """Ends the lane and the stream, if there are any. The next commit chooses again."""
        self.chosen = False
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def stop(self) -> None:
        """Ends the renewals and the stream; only `leave` is still possible."""
        self._stopped = True
        self._background.close()
        self.drop_stream()

    def close(self) -> None:
        self.stop()
        self._channel.close()

    def abort(self) -> None:
        """Closes the connection at once, from any thread: a call in progress, or begun later, raises an error."""
        self._stopped = True
        self._channel.close()  # first, because `stop` waits for a renewal in progress
        self.stop()
