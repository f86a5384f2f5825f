from gem_api.v1 import tensors_pb2 as _tensors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotConvention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_CONVENTION_UNSPECIFIED: _ClassVar[SnapshotConvention]
    SNAPSHOT_CONVENTION_AFTER: _ClassVar[SnapshotConvention]
    SNAPSHOT_CONVENTION_PAPER: _ClassVar[SnapshotConvention]
    SNAPSHOT_CONVENTION_REFERENCE: _ClassVar[SnapshotConvention]

class ShardMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARD_MODE_UNSPECIFIED: _ClassVar[ShardMode]
    SHARD_MODE_PARTITION: _ClassVar[ShardMode]
    SHARD_MODE_REPLICATE: _ClassVar[ShardMode]

class UpdateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_KIND_UNSPECIFIED: _ClassVar[UpdateKind]
    UPDATE_KIND_GRADIENT: _ClassVar[UpdateKind]
    UPDATE_KIND_DELTA: _ClassVar[UpdateKind]

class LeaseEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_END_REASON_UNSPECIFIED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_LEFT: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_EXPIRED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_ROLLED_BACK: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_REPLACED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_QUARANTINED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_STALLED: _ClassVar[LeaseEndReason]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_WAITING: _ClassVar[RunState]
    RUN_STATE_TRAINING: _ClassVar[RunState]
    RUN_STATE_COMPLETE: _ClassVar[RunState]
    RUN_STATE_DRAINING: _ClassVar[RunState]
    RUN_STATE_STALLED: _ClassVar[RunState]
    RUN_STATE_FOLLOWING: _ClassVar[RunState]
SNAPSHOT_CONVENTION_UNSPECIFIED: SnapshotConvention
SNAPSHOT_CONVENTION_AFTER: SnapshotConvention
SNAPSHOT_CONVENTION_PAPER: SnapshotConvention
SNAPSHOT_CONVENTION_REFERENCE: SnapshotConvention
SHARD_MODE_UNSPECIFIED: ShardMode
SHARD_MODE_PARTITION: ShardMode
SHARD_MODE_REPLICATE: ShardMode
UPDATE_KIND_UNSPECIFIED: UpdateKind
UPDATE_KIND_GRADIENT: UpdateKind
UPDATE_KIND_DELTA: UpdateKind
LEASE_END_REASON_UNSPECIFIED: LeaseEndReason
LEASE_END_REASON_LEFT: LeaseEndReason
LEASE_END_REASON_EXPIRED: LeaseEndReason
LEASE_END_REASON_ROLLED_BACK: LeaseEndReason
LEASE_END_REASON_REPLACED: LeaseEndReason
LEASE_END_REASON_QUARANTINED: LeaseEndReason
LEASE_END_REASON_STALLED: LeaseEndReason
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_WAITING: RunState
RUN_STATE_TRAINING: RunState
RUN_STATE_COMPLETE: RunState
RUN_STATE_DRAINING: RunState
RUN_STATE_STALLED: RunState
RUN_STATE_FOLLOWING: RunState

class Hyperparameters(_message.Message):
    __slots__ = ("rule", "learning_rate", "momentum", "kappa", "epsilon", "pi_max", "snapshot", "batch_size", "epochs", "steps", "shards", "shard_size", "seed", "rule_options", "local_steps", "local_momentum", "weight_decay", "schedule", "warmup_versions", "warmup_factor", "decay_versions", "decay_factor", "optimizer", "optimizer_options", "batch_variation", "smallest_share", "reply_wait", "average")
    RULE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    KAPPA_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    PI_MAX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    DECAY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_VARIATION_FIELD_NUMBER: _ClassVar[int]
    SMALLEST_SHARE_FIELD_NUMBER: _ClassVar[int]
    REPLY_WAIT_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    rule: str
    learning_rate: float
    momentum: float
    kappa: float
    epsilon: float
    pi_max: float
    snapshot: SnapshotConvention
    batch_size: int
    epochs: int
    steps: int
    shards: ShardMode
    shard_size: int
    seed: int
    rule_options: str
    local_steps: int
    local_momentum: float
    weight_decay: float
    schedule: str
    warmup_versions: int
    warmup_factor: float
    decay_versions: int
    decay_factor: float
    optimizer: str
    optimizer_options: str
    batch_variation: float
    smallest_share: float
    reply_wait: float
    average: float
    def __init__(self, rule: _Optional[str] = ..., learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., kappa: _Optional[float] = ..., epsilon: _Optional[float] = ..., pi_max: _Optional[float] = ..., snapshot: _Optional[_Union[SnapshotConvention, str]] = ..., batch_size: _Optional[int] = ..., epochs: _Optional[int] = ..., steps: _Optional[int] = ..., shards: _Optional[_Union[ShardMode, str]] = ..., shard_size: _Optional[int] = ..., seed: _Optional[int] = ..., rule_options: _Optional[str] = ..., local_steps: _Optional[int] = ..., local_momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ..., schedule: _Optional[str] = ..., warmup_versions: _Optional[int] = ..., warmup_factor: _Optional[float] = ..., decay_versions: _Optional[int] = ..., decay_factor: _Optional[float] = ..., optimizer: _Optional[str] = ..., optimizer_options: _Optional[str] = ..., batch_variation: _Optional[float] = ..., smallest_share: _Optional[float] = ..., reply_wait: _Optional[float] = ..., average: _Optional[float] = ...) -> None: ...

class OptimizerChoice(_message.Message):
    __slots__ = ("optimizer", "options", "learning_rate", "weight_decay", "schedule")
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    optimizer: str
    options: str
    learning_rate: float
    weight_decay: float
    schedule: Schedule
    def __init__(self, optimizer: _Optional[str] = ..., options: _Optional[str] = ..., learning_rate: _Optional[float] = ..., weight_decay: _Optional[float] = ..., schedule: _Optional[_Union[Schedule, _Mapping]] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("schedule", "warmup_versions", "warmup_factor", "decay_versions", "decay_factor")
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    DECAY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    warmup_versions: int
    warmup_factor: float
    decay_versions: int
    decay_factor: float
    def __init__(self, schedule: _Optional[str] = ..., warmup_versions: _Optional[int] = ..., warmup_factor: _Optional[float] = ..., decay_versions: _Optional[int] = ..., decay_factor: _Optional[float] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker_name", "layout", "overlap", "optimizer", "lead", "frozen_fingerprint", "contract", "release")
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    worker_name: str
    layout: _tensors_pb2.TensorLayout
    overlap: bool
    optimizer: OptimizerChoice
    lead: LeadsAnswer
    frozen_fingerprint: bytes
    contract: int
    release: str
    def __init__(self, worker_name: _Optional[str] = ..., layout: _Optional[_Union[_tensors_pb2.TensorLayout, _Mapping]] = ..., overlap: bool = ..., optimizer: _Optional[_Union[OptimizerChoice, _Mapping]] = ..., lead: _Optional[_Union[LeadsAnswer, _Mapping]] = ..., frozen_fingerprint: _Optional[bytes] = ..., contract: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class LeadsAnswer(_message.Message):
    __slots__ = ("lease_id", "run_id", "hyperparameters")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    run_id: str
    hyperparameters: Hyperparameters
    def __init__(self, lease_id: _Optional[str] = ..., run_id: _Optional[str] = ..., hyperparameters: _Optional[_Union[Hyperparameters, _Mapping]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("lease_id", "lease_seconds", "hyperparameters", "layout", "layout_fingerprint", "must_initialize", "run_id", "steps_done", "update_kind", "peers", "contract", "release")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MUST_INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_KIND_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    hyperparameters: Hyperparameters
    layout: _tensors_pb2.TensorLayout
    layout_fingerprint: bytes
    must_initialize: bool
    run_id: str
    steps_done: int
    update_kind: UpdateKind
    peers: _containers.RepeatedScalarFieldContainer[str]
    contract: int
    release: str
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., hyperparameters: _Optional[_Union[Hyperparameters, _Mapping]] = ..., layout: _Optional[_Union[_tensors_pb2.TensorLayout, _Mapping]] = ..., layout_fingerprint: _Optional[bytes] = ..., must_initialize: bool = ..., run_id: _Optional[str] = ..., steps_done: _Optional[int] = ..., update_kind: _Optional[_Union[UpdateKind, str]] = ..., peers: _Optional[_Iterable[str]] = ..., contract: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class InitializeCentralRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: InitializeCentralHeader
    chunk: _tensors_pb2.Chunk
    def __init__(self, header: _Optional[_Union[InitializeCentralHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class InitializeCentralHeader(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class InitializeCentralResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class OpenLaneResponse(_message.Message):
    __slots__ = ("socket", "port", "token")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    socket: str
    port: int
    token: bytes
    def __init__(self, socket: _Optional[str] = ..., port: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("lease_id", "theta_dtype", "average")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    THETA_DTYPE_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    theta_dtype: _tensors_pb2.WireDtype
    average: bool
    def __init__(self, lease_id: _Optional[str] = ..., theta_dtype: _Optional[_Union[_tensors_pb2.WireDtype, str]] = ..., average: bool = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    chunk: _tensors_pb2.Chunk
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("version", "layout_fingerprint", "layout", "must_initialize", "peers", "progress", "average")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MUST_INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    layout_fingerprint: bytes
    layout: _tensors_pb2.TensorLayout
    must_initialize: bool
    peers: _containers.RepeatedScalarFieldContainer[str]
    progress: float
    average: bool
    def __init__(self, version: _Optional[int] = ..., layout_fingerprint: _Optional[bytes] = ..., layout: _Optional[_Union[_tensors_pb2.TensorLayout, _Mapping]] = ..., must_initialize: bool = ..., peers: _Optional[_Iterable[str]] = ..., progress: _Optional[float] = ..., average: bool = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: CommitHeader
    chunk: _tensors_pb2.Chunk
    def __init__(self, header: _Optional[_Union[CommitHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class CommitHeader(_message.Message):
    __slots__ = ("lease_id", "sequence", "base_version", "wire_dtype", "layout_fingerprint", "loss", "sample_count", "theta_dtype", "update_kind", "theta_base", "traceparent", "tracestate", "batch_share")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    THETA_DTYPE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_KIND_FIELD_NUMBER: _ClassVar[int]
    THETA_BASE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SHARE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    sequence: int
    base_version: int
    wire_dtype: _tensors_pb2.WireDtype
    layout_fingerprint: bytes
    loss: float
    sample_count: int
    theta_dtype: _tensors_pb2.WireDtype
    update_kind: UpdateKind
    theta_base: int
    traceparent: str
    tracestate: str
    batch_share: float
    def __init__(self, lease_id: _Optional[str] = ..., sequence: _Optional[int] = ..., base_version: _Optional[int] = ..., wire_dtype: _Optional[_Union[_tensors_pb2.WireDtype, str]] = ..., layout_fingerprint: _Optional[bytes] = ..., loss: _Optional[float] = ..., sample_count: _Optional[int] = ..., theta_dtype: _Optional[_Union[_tensors_pb2.WireDtype, str]] = ..., update_kind: _Optional[_Union[UpdateKind, str]] = ..., theta_base: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., batch_share: _Optional[float] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("result", "chunk")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    result: CommitResult
    chunk: _tensors_pb2.Chunk
    def __init__(self, result: _Optional[_Union[CommitResult, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class CommitResult(_message.Message):
    __slots__ = ("sequence", "ticket", "version", "base_version", "staleness", "pi", "discarded", "theta_dtype", "batch_share", "progress")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PI_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    THETA_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SHARE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    ticket: int
    version: int
    base_version: int
    staleness: int
    pi: PiSummary
    discarded: bool
    theta_dtype: _tensors_pb2.WireDtype
    batch_share: float
    progress: float
    def __init__(self, sequence: _Optional[int] = ..., ticket: _Optional[int] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., staleness: _Optional[int] = ..., pi: _Optional[_Union[PiSummary, _Mapping]] = ..., discarded: bool = ..., theta_dtype: _Optional[_Union[_tensors_pb2.WireDtype, str]] = ..., batch_share: _Optional[float] = ..., progress: _Optional[float] = ...) -> None: ...

class PiSummary(_message.Message):
    __slots__ = ("median", "zero_ratio", "max_ratio", "proxy_energy", "central_energy")
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    ZERO_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_RATIO_FIELD_NUMBER: _ClassVar[int]
    PROXY_ENERGY_FIELD_NUMBER: _ClassVar[int]
    CENTRAL_ENERGY_FIELD_NUMBER: _ClassVar[int]
    median: float
    zero_ratio: float
    max_ratio: float
    proxy_energy: float
    central_energy: float
    def __init__(self, median: _Optional[float] = ..., zero_ratio: _Optional[float] = ..., max_ratio: _Optional[float] = ..., proxy_energy: _Optional[float] = ..., central_energy: _Optional[float] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "waiting")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    waiting: bool
    def __init__(self, lease_id: _Optional[str] = ..., waiting: bool = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class LeaveClusterRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class LeaveClusterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseShardRequest(_message.Message):
    __slots__ = ("lease_id", "sample_count", "holding", "samples_fingerprint")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    sample_count: int
    holding: _containers.RepeatedScalarFieldContainer[int]
    samples_fingerprint: bytes
    def __init__(self, lease_id: _Optional[str] = ..., sample_count: _Optional[int] = ..., holding: _Optional[_Iterable[int]] = ..., samples_fingerprint: _Optional[bytes] = ...) -> None: ...

class LeaseShardResponse(_message.Message):
    __slots__ = ("shard", "wait_seconds", "complete")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    shard: Shard
    wait_seconds: float
    complete: bool
    def __init__(self, shard: _Optional[_Union[Shard, _Mapping]] = ..., wait_seconds: _Optional[float] = ..., complete: bool = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("shard_id", "epoch", "begin", "end", "indices")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    epoch: int
    begin: int
    end: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard_id: _Optional[int] = ..., epoch: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteShardRequest(_message.Message):
    __slots__ = ("lease_id", "shard_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    shard_id: int
    def __init__(self, lease_id: _Optional[str] = ..., shard_id: _Optional[int] = ...) -> None: ...

class CompleteShardResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: bool = ...) -> None: ...

class ReportEvaluationRequest(_message.Message):
    __slots__ = ("version", "loss", "accuracy")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    version: int
    loss: float
    accuracy: float
    def __init__(self, version: _Optional[int] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ...) -> None: ...

class ReportEvaluationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("curves",)
    CURVES_FIELD_NUMBER: _ClassVar[int]
    curves: bool
    def __init__(self, curves: bool = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("reason", "seconds", "needed_bytes", "free_bytes")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    seconds: float
    needed_bytes: int
    free_bytes: int
    def __init__(self, reason: _Optional[str] = ..., seconds: _Optional[float] = ..., needed_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("min_workers", "seconds", "at_most_seconds")
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AT_MOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    min_workers: int
    seconds: float
    at_most_seconds: float
    def __init__(self, min_workers: _Optional[int] = ..., seconds: _Optional[float] = ..., at_most_seconds: _Optional[float] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("run_id", "state", "version", "hyperparameters", "parameter_count", "workers", "commits", "leases_ended", "shards", "training_loss", "pi_median", "staleness", "evaluation", "queue_length", "memory_bytes", "memory_limit_bytes", "checkpoint_version", "checkpoint_age_seconds", "uptime_seconds", "server_version", "range_index", "range_count", "peers", "stall", "worker_count", "lease_seconds", "learning_rate", "commits_per_second", "nonfinite_losses", "begin_version", "start_version", "curves", "contract", "start", "first_worker")
    class CommitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LeasesEndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_LOSS_FIELD_NUMBER: _ClassVar[int]
    PI_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    COMMITS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_LOSSES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_VERSION_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FIRST_WORKER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: RunState
    version: int
    hyperparameters: Hyperparameters
    parameter_count: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    commits: _containers.ScalarMap[str, int]
    leases_ended: _containers.ScalarMap[str, int]
    shards: ShardStatus
    training_loss: float
    pi_median: float
    staleness: float
    evaluation: ReportEvaluationRequest
    queue_length: int
    memory_bytes: int
    memory_limit_bytes: int
    checkpoint_version: int
    checkpoint_age_seconds: float
    uptime_seconds: float
    server_version: str
    range_index: int
    range_count: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    stall: Stall
    worker_count: int
    lease_seconds: float
    learning_rate: float
    commits_per_second: float
    nonfinite_losses: int
    begin_version: int
    start_version: int
    curves: RunCurves
    contract: int
    start: Start
    first_worker: str
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., version: _Optional[int] = ..., hyperparameters: _Optional[_Union[Hyperparameters, _Mapping]] = ..., parameter_count: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., commits: _Optional[_Mapping[str, int]] = ..., leases_ended: _Optional[_Mapping[str, int]] = ..., shards: _Optional[_Union[ShardStatus, _Mapping]] = ..., training_loss: _Optional[float] = ..., pi_median: _Optional[float] = ..., staleness: _Optional[float] = ..., evaluation: _Optional[_Union[ReportEvaluationRequest, _Mapping]] = ..., queue_length: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., checkpoint_version: _Optional[int] = ..., checkpoint_age_seconds: _Optional[float] = ..., uptime_seconds: _Optional[float] = ..., server_version: _Optional[str] = ..., range_index: _Optional[int] = ..., range_count: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., stall: _Optional[_Union[Stall, _Mapping]] = ..., worker_count: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., learning_rate: _Optional[float] = ..., commits_per_second: _Optional[float] = ..., nonfinite_losses: _Optional[int] = ..., begin_version: _Optional[int] = ..., start_version: _Optional[int] = ..., curves: _Optional[_Union[RunCurves, _Mapping]] = ..., contract: _Optional[int] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., first_worker: _Optional[str] = ...) -> None: ...

class RunCurves(_message.Message):
    __slots__ = ("seconds", "version", "commits_per_second", "workers", "loss", "pi_median", "staleness", "evaluation_loss", "accuracy")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PI_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    version: _containers.RepeatedScalarFieldContainer[int]
    commits_per_second: _containers.RepeatedScalarFieldContainer[float]
    workers: _containers.RepeatedScalarFieldContainer[float]
    loss: _containers.RepeatedScalarFieldContainer[float]
    pi_median: _containers.RepeatedScalarFieldContainer[float]
    staleness: _containers.RepeatedScalarFieldContainer[float]
    evaluation_loss: _containers.RepeatedScalarFieldContainer[float]
    accuracy: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seconds: _Optional[_Iterable[float]] = ..., version: _Optional[_Iterable[int]] = ..., commits_per_second: _Optional[_Iterable[float]] = ..., workers: _Optional[_Iterable[float]] = ..., loss: _Optional[_Iterable[float]] = ..., pi_median: _Optional[_Iterable[float]] = ..., staleness: _Optional[_Iterable[float]] = ..., evaluation_loss: _Optional[_Iterable[float]] = ..., accuracy: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "commits", "staleness", "pi_median", "loss", "lease_remaining_seconds", "memory_bytes", "shards", "rejected", "transport", "pace_seconds", "batch_share", "wait_seconds", "waited_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PI_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SHARE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    commits: int
    staleness: int
    pi_median: float
    loss: float
    lease_remaining_seconds: float
    memory_bytes: int
    shards: int
    rejected: int
    transport: str
    pace_seconds: float
    batch_share: float
    wait_seconds: float
    waited_seconds: float
    def __init__(self, name: _Optional[str] = ..., commits: _Optional[int] = ..., staleness: _Optional[int] = ..., pi_median: _Optional[float] = ..., loss: _Optional[float] = ..., lease_remaining_seconds: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., shards: _Optional[int] = ..., rejected: _Optional[int] = ..., transport: _Optional[str] = ..., pace_seconds: _Optional[float] = ..., batch_share: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., waited_seconds: _Optional[float] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("epoch", "epochs", "pending", "leased", "completed", "samples_completed", "samples_committed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    epochs: int
    pending: int
    leased: int
    completed: int
    samples_completed: int
    samples_committed: int
    def __init__(self, epoch: _Optional[int] = ..., epochs: _Optional[int] = ..., pending: _Optional[int] = ..., leased: _Optional[int] = ..., completed: _Optional[int] = ..., samples_completed: _Optional[int] = ..., samples_committed: _Optional[int] = ...) -> None: ...
