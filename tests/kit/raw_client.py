"""A raw client for tests: sends anything to a server, valid or not, frame by frame, and shows exactly what came back.

It shares nothing with the SDK: no retries, no checks, no second thoughts.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from gem_api.layout import Layout
from gem_api.v1 import admin_pb2, tensors_pb2
from gem_api.v1 import training_pb2 as pb
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from kit.server import DEADLINE, Live

T = TypeVar("T")
Theta = npt.NDArray[np.float32]
SERVICES = (pb.DESCRIPTOR.services_by_name["TrainingService"], admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
RPCS: dict[str, MethodDescriptor] = {method.name: method for service in SERVICES for method in service.methods}
SMALL = Layout.of({"w": (3, 5), "b": (2,)})  # 17 parameters
CHUNK = 1 << 20
Metadata = tuple[tuple[str, str], ...]
FLOAT32 = tensors_pb2.WIRE_DTYPE_FLOAT32


def path(rpc: str) -> str:
    """The path of an RPC on the wire."""
    method = RPCS[rpc]
    return f"/{method.containing_service.full_name}/{rpc}"


class Refusal(NamedTuple):
    """How a call, or a lane, failed: its status (a lane has none), and what the server says about it."""

    status: grpc.StatusCode | None
    error: str
    reason: str
    details: str

    @classmethod
    def of(cls, call: Any) -> Refusal:
        """Reads a failed call, or the exception that it raised."""
        metadata = dict(call.trailing_metadata() or ())
        return cls(call.code(), metadata.get("gem-error", ""), metadata.get("gem-lease-end-reason", ""), call.details() or "")


class CommitStream(Protocol):
    """Carries commits, in the frames of the Commit call: a call of gRPC, or a lane that sends what the frames hold.

    Attributes:
        sent: The bytes that it has sent so far, as the server counts them.
    """

    sent: int

    def send(self, *frames: bytes) -> None: ...

    def half_close(self) -> None: ...

    def cancel(self) -> None: ...

    def answer(self, size: int) -> tuple[pb.CommitResult, Theta]: ...

    def refusal(self) -> Refusal: ...

    def ended_well(self) -> bool: ...


class Stream:
    """One call of any kind, in raw frames."""

    def __init__(self, channel: grpc.Channel, rpc: str, timeout: float, metadata: Metadata = ()) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(path(rpc))(iter(self._frames.get, None), timeout=timeout, metadata=metadata)
        self.sent = 0

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.sent += len(frame)
            self._frames.put(frame)

    def half_close(self) -> None:
        self._frames.put(None)

    def cancel(self) -> None:
        self._call.cancel()
        self._frames.put(None)

    def read(self) -> bytes:
        """The next frame. Raises grpc.RpcError if the call failed, StopIteration if it ended with OK."""
        return next(self._call)  # type: ignore[no-any-return]

    def ended_well(self) -> bool:
        """Whether no further frame comes and the status is OK."""
        return next(self._call, None) is None and self._call.code() == grpc.StatusCode.OK

    def refusal(self) -> Refusal:
        """Reads to the end, which must be an error, and returns it."""
        try:
            frames = sum(1 for _ in self._call)
        except grpc.RpcError as error:
            self._frames.put(None)
            return Refusal.of(error)
        raise AssertionError(f"the call ended well, after {frames} frames")

    def answer(self, size: int) -> tuple[pb.CommitResult, Theta]:
        """A commit's result and the θ of `size` elements that follows it."""
        first = pb.CommitResponse.FromString(self.read())
        return first.result, self._theta(first, size)

    def pulled(self, size: int) -> tuple[pb.PullHeader, Theta]:
        """A pull's header and θ."""
        first = pb.PullResponse.FromString(self.read())
        return first.header, self._theta(first, size)

    def _theta(self, first: Any, size: int) -> Theta:
        """θ, the first chunk of which came with the header."""
        packed = first.chunk.data
        while len(packed) < 4 * size:
            chunk = type(first).FromString(self.read()).chunk
            assert chunk.offset == len(packed)
            packed += chunk.data
        assert len(packed) == 4 * size
        return np.frombuffer(packed, "<f4")


class Wire:
    """A channel to a server; `metadata` goes with every call.

    Attributes:
        open_commits: Opens what carries a worker's commits: a call of gRPC, unless `ways` has set another way.
    """

    def __init__(self, address: str, metadata: Metadata = (), credentials: grpc.ChannelCredentials | None = None) -> None:
        self.open_commits: Callable[[Worker], CommitStream] = lambda worker: self.stream("Commit")
        self._metadata = metadata
        # Without the probe the server sends little more than is read: on a busy machine gRPC would take in all of a large θ.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)

    def close(self) -> None:
        self._channel.close()

    def stream(self, rpc: str, *frames: bytes, timeout: float = DEADLINE) -> Stream:
        """Opens a call and sends its first frames."""
        stream = Stream(self._channel, rpc, timeout, self._metadata)
        stream.send(*frames)
        return stream

    def whole(self, rpc: str, *frames: bytes, timeout: float = DEADLINE) -> Stream:
        """A call that sends all its frames, and half-closes."""
        stream = self.stream(rpc, *frames, timeout=timeout)
        stream.half_close()
        return stream

    def call(self, rpc: str, request: Any) -> Any:
        """Makes a unary call, with messages. Raises grpc.RpcError."""
        answer = self._channel.unary_unary(path(rpc))(request.SerializeToString(), timeout=DEADLINE, metadata=self._metadata)
        return GetMessageClass(RPCS[rpc].output_type).FromString(answer)

    def refusal(self, rpc: str, request: Any) -> Refusal:
        """Makes a unary call, which must fail, and returns how it failed."""
        return self.whole(rpc, request.SerializeToString()).refusal()

    def join(self, name: str, layout: Layout = SMALL) -> Worker:
        """Registers a worker."""
        request = pb.RegisterWorkerRequest(worker_name=name, layout=layout.to_message())
        return Worker(self, self.call("RegisterWorker", request))

    def started(self, name: str, layout: Layout = SMALL, value: float = 1.0) -> Worker:
        """Registers the first worker, which gives every element of θ the value `value` and pulls."""
        worker = self.join(name, layout)
        worker.initialize(np.full(layout.size, value, np.float32))
        worker.pull()
        return worker

    def crew(self, size: int) -> list[Worker]:
        """Workers "worker 0", "worker 1" …, which have all pulled version 0."""
        crew = [self.started("worker 0"), *(self.join(f"worker {number}") for number in range(1, size))]
        for worker in crew[1:]:
            worker.pull()
        return crew

    def status(self) -> pb.GetStatusResponse:
        return self.call("GetStatus", pb.GetStatusRequest())  # type: ignore[no-any-return]

    def pull(self, size: int) -> tuple[pb.PullHeader, Theta]:
        """θ, read without a lease."""
        return self.whole("Pull", pb.PullRequest().SerializeToString()).pulled(size)


class Worker:
    """A registered worker that counts its commits, and sends what the test asks for.

    Attributes:
        lease_id: Its lease.
        size: Elements of θ.
        sequence: The next commit's.
        base_version: The version that it was last given.
    """

    def __init__(self, wire: Wire, registration: pb.RegisterWorkerResponse) -> None:
        self.wire = wire
        self.registration = registration
        self.lease_id: str = registration.lease_id
        self.size = int(registration.layout.range_end)
        self.sequence = 1
        self.base_version = 0

    def initialize(self, values: Theta) -> None:
        header = initialize_header(self.lease_id)
        stream = self.wire.whole("InitializeCentral", header, *chunks(values, pb.InitializeCentralRequest))
        assert pb.InitializeCentralResponse.FromString(stream.read()).version == 0

    def pull(self) -> tuple[pb.PullHeader, Theta]:
        header, theta = self.open_pull().pulled(self.size)
        self.base_version = header.version
        return header, theta

    def open_pull(self) -> Stream:
        return self.wire.whole("Pull", pb.PullRequest(lease_id=self.lease_id).SerializeToString())

    def header(self, **changes: Any) -> bytes:
        """The frame that opens this worker's next commit, with some fields changed."""
        fields = {
            "lease_id": self.lease_id,
            "sequence": self.sequence,
            "base_version": self.base_version,
            "wire_dtype": FLOAT32,
            "layout_fingerprint": self.registration.layout_fingerprint,
            "sample_count": 1,
        }
        return pb.CommitRequest(header=pb.CommitHeader(**{**fields, **changes})).SerializeToString()

    def gradient(self, value: float = 1.0) -> Theta:
        return np.full(self.size, value, np.float32)

    def body(self, value: float = 1.0) -> list[bytes]:
        """The frames of a gradient whose elements are all `value`."""
        return chunks(self.gradient(value))

    def stream(self, *frames: bytes) -> CommitStream:
        """Opens what carries this worker's commits, and sends the first frames."""
        stream = self.wire.open_commits(self)
        stream.send(*frames)
        return stream

    def whole(self, *frames: bytes) -> CommitStream:
        """As `stream`; nothing follows the frames."""
        stream = self.stream(*frames)
        stream.half_close()
        return stream

    def commit_on(self, stream: CommitStream, value: float = 1.0) -> tuple[pb.CommitResult, Theta]:
        """One valid commit on an open stream."""
        stream.send(self.header(), *self.body(value))
        return self.took(stream.answer(self.size))

    def commit(self, value: float = 1.0) -> tuple[pb.CommitResult, Theta]:
        """One valid commit on a new stream."""
        return self.took(self.whole(self.header(), *self.body(value)).answer(self.size))

    def took(self, answer: tuple[pb.CommitResult, Theta]) -> tuple[pb.CommitResult, Theta]:
        """Records the result of a commit."""
        self.sequence, self.base_version = answer[0].sequence + 1, answer[0].base_version
        return answer

    def leave(self) -> None:
        self.wire.call("LeaveCluster", pb.LeaveClusterRequest(lease_id=self.lease_id))


def chunk(offset: int, data: bytes, message_type: Any = pb.CommitRequest) -> bytes:
    """A chunk's frame, valid or not."""
    frame: bytes = message_type(chunk=tensors_pb2.Chunk(offset=offset, data=data)).SerializeToString()
    return frame


def chunks(values: Theta, message_type: Any = pb.CommitRequest, size: int = CHUNK) -> list[bytes]:
    """The frames that carry a packed buffer in chunks of `size` bytes."""
    data = values.astype("<f4").tobytes()
    return [chunk(at, data[at : at + size], message_type) for at in range(0, len(data), size)]


def initialize_header(lease_id: str) -> bytes:
    header = pb.InitializeCentralHeader(lease_id=lease_id)
    return pb.InitializeCentralRequest(header=header).SerializeToString()


def register_request(name: str, tensors: Sequence[tuple[str, Sequence[int]]], begin: int, end: int) -> pb.RegisterWorkerRequest:
    """A registration request, not validated."""
    specs = [tensors_pb2.TensorSpec(name=tensor, shape=shape) for tensor, shape in tensors]
    layout = tensors_pb2.TensorLayout(tensors=specs, range_begin=begin, range_end=end)
    return pb.RegisterWorkerRequest(worker_name=name, layout=layout)


@contextmanager
def wired(live: Live, metadata: Metadata = (), credentials: grpc.ChannelCredentials | None = None) -> Iterator[Wire]:
    """Runs a client during a `with` block."""
    wire = Wire(live.address, metadata, credentials)
    try:
        yield wire
    finally:
        wire.close()


def theta_bits(live: Live) -> tuple[int, bytes]:
    """θ's version and its bits."""
    return live.on_loop(lambda: (live.core.central.version, live.core.central.theta.tobytes()))


def received_bytes(live: Live) -> int:
    """Bytes of tensor frames that the server has read."""
    return live.on_loop(lambda: live.server.wiring.traffic.received)


def on_server_loop(live: Live, work: Callable[[], Coroutine[Any, Any, T]], deadline: float = DEADLINE) -> T:
    """Runs asyncio clients on the server's own loop: hundreds of them need no threads."""
    done: Future[T] = Future()
    running: list[asyncio.Task[None]] = []

    async def run() -> None:
        try:
            done.set_result(await work())
        except BaseException as error:
            done.set_exception(error)

    live.on_loop(lambda: running.append(asyncio.ensure_future(run())))
    return done.result(deadline)


@contextmanager
def apply_thread_held(live: Live) -> Iterator[Callable[[], None]]:
    """Blocks the apply loop between two commits, until the block ends or the yielded function is called. All else continues."""
    held, release = threading.Event(), asyncio.Event()

    async def hold() -> None:
        held.set()
        await release.wait()

    def let_go() -> None:
        with suppress(RuntimeError):  # a server that was drained may have ended already
            live._loop.call_soon_threadsafe(release.set)

    live.on_loop(lambda: live.server.wiring.apply_loop._enqueue(hold))
    assert held.wait(DEADLINE)
    try:
        yield let_go
    finally:
        let_go()
