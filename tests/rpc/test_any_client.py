"""Clients in any language work: a caller needs only generated code, reflection and health checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gem_api.v1 import admin_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from kit.raw_client import Wire, Worker, apply_thread_held
from kit.server import DEADLINE, Live

PROTO = Path(__file__).resolve().parents[2] / "proto"
SERVICES = ["gem_api.v1.AdminService", "gem_api.v1.TrainingService", "grpc.health.v1.Health"]

# Written as a stranger would write it, with the comments of training.proto for a manual.
STRANGER = """
import struct, sys
import grpc
from gem_api.v1 import tensors_pb2 as tensors, training_pb2 as pb, training_pb2_grpc

stub = training_pb2_grpc.TrainingServiceStub(grpc.insecure_channel(sys.argv[1]))
layout = tensors.TensorLayout(
    tensors=[tensors.TensorSpec(name="w", shape=[2, 2]), tensors.TensorSpec(name="b", shape=[1])], range_begin=0, range_end=5
)
me = stub.RegisterWorker(pb.RegisterWorkerRequest(worker_name="stranger", layout=layout))
assert me.must_initialize and me.layout.range_end == 5 and me.hyperparameters.rule == "gem"
first = struct.pack("<5f", 1, 2, 3, 4, 5)
stub.InitializeCentral(iter([
    pb.InitializeCentralRequest(header=pb.InitializeCentralHeader(lease_id=me.lease_id)),
    pb.InitializeCentralRequest(chunk=tensors.Chunk(offset=0, data=first)),
]))
pulled = list(stub.Pull(pb.PullRequest(lease_id=me.lease_id)))
assert pulled[0].header.version == 0 and b"".join(frame.chunk.data for frame in pulled) == first
shard = stub.LeaseShard(pb.LeaseShardRequest(lease_id=me.lease_id, sample_count=3)).shard
assert sorted(shard.indices) == [0, 1, 2]
header = pb.CommitHeader(
    lease_id=me.lease_id, sequence=1, base_version=0, wire_dtype=tensors.WIRE_DTYPE_FLOAT32,
    layout_fingerprint=me.layout_fingerprint, loss=1.5, sample_count=3,
)
gradient = struct.pack("<5f", 1, 1, 1, 1, 1)
answers = list(stub.Commit(iter([
    pb.CommitRequest(header=header),
    pb.CommitRequest(chunk=tensors.Chunk(offset=0, data=gradient[:8])),
    pb.CommitRequest(chunk=tensors.Chunk(offset=8, data=gradient[8:])),
])))
result = answers[0].result
assert (result.sequence, result.version, result.base_version, result.staleness) == (1, 1, 1, 0)
theta = struct.unpack("<5f", b"".join(frame.chunk.data for frame in answers))
assert all(after < before for after, before in zip(theta, (1, 2, 3, 4, 5)))
assert stub.CompleteShard(pb.CompleteShardRequest(lease_id=me.lease_id, shard_id=shard.shard_id)).accepted
assert stub.LeaseShard(pb.LeaseShardRequest(lease_id=me.lease_id, sample_count=3)).complete
stub.ReportEvaluation(pb.ReportEvaluationRequest(version=1, loss=0.5, accuracy=0.75))
status = stub.GetStatus(pb.GetStatusRequest())
assert status.state == pb.RUN_STATE_COMPLETE and status.training_loss == 1.5 and status.evaluation.accuracy == 0.75
stub.LeaveCluster(pb.LeaveClusterRequest(lease_id=me.lease_id))
try:
    stub.RenewLease(pb.RenewLeaseRequest(lease_id=me.lease_id))
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert ("gem-error", "LEASE_ENDED") in error.trailing_metadata()
else:
    raise AssertionError("the lease outlived its end")
print("trained:", *theta)
"""


def generate(into: Path) -> None:
    """What any client's build does with the .proto files."""
    files = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("gem_api/v1/*.proto"))
    tool = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={into}", f"--grpc_python_out={into}"]
    subprocess.run([*tool, *files], check=True, capture_output=True, timeout=DEADLINE)
    for folder in ("gem_api", "gem_api/v1"):
        (into / folder / "__init__.py").touch()


def test_a_client_made_of_generated_code_alone_takes_part_in_a_run(live: Live, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    generate(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", STRANGER, live.address],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("trained:")
    assert live.on_loop(lambda: live.core.central.version) == 1
    assert dict(live.on_loop(lambda: live.core.leases.ended)) == {"left": 1}


@pytest.fixture
def channel(live: Live) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(live.address) as channel:
        yield channel


def test_reflection_names_every_service_and_its_methods(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(SERVICES) <= set(database.get_services())
    file = database.FindFileContainingSymbol("gem_api.v1.TrainingService")
    assert file.name == "gem_api/v1/training.proto"
    assert "Commit" in [method.name for service in file.service for method in service.method]


def test_health_says_serving_of_each_service_by_name_and_not_serving_while_the_server_drains(
    live: Live, wire: Wire, worker: Worker, channel: grpc.Channel
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    with apply_thread_held(live):
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        for service in ("", *SERVICES[:2]):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        wire.call("Drain", admin_pb2.DrainRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
