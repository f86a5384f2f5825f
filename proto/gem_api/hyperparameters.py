"""The run's settings: held by the server, handed to every worker, named the same everywhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from gem_api.v1 import training_pb2 as pb

RULES = (
    "gem", "downpour", "adaptive", "agn", "aeasgd", "dcasgd", "fedasync", "fedbuff", "ringmaster", "diloco",
)  # fmt: skip
SNAPSHOTS = ("after", "paper", "reference")
SHARD_MODES = ("partition", "replicate")
SCHEDULES = ("constant", "step", "cosine")
# Settings that a run keeps: the workers' buffers and the shard ledger depend on them.
FIXED = ("rule", "rule_options", "snapshot", "local_steps", "batch_size", "shards", "shard_size", "seed")
# The largest value of each whole number: what its field of the message carries, and checkpoints, whose numbers have 63 bits.
REFERENCE_DEFAULTS = {"epsilon": 1e-12}  # the authors' code
# A step of Adam does not shrink with the gradient, but Δ does: π must be free to grow as 1/|g|.
ADAM_DEFAULTS = {"learning_rate": 0.003, "pi_max": 1e6}
_MAX_OF_TYPE = {FieldDescriptor.TYPE_UINT32: (1 << 32) - 1, FieldDescriptor.TYPE_UINT64: (1 << 63) - 1}
MAX_VALUES = {
    field.name: _MAX_OF_TYPE[field.type] for field in pb.Hyperparameters.DESCRIPTOR.fields if field.type in _MAX_OF_TYPE
}
SHARD_SIZE = 256  # unless batches do not fit


@dataclass(frozen=True)
class Hyperparameters:
    """The run's settings.

    Attributes:
        rule: The update rule: one of RULES, or a user's own as "module:Class".
        learning_rate: η.
        momentum: μ of the proxy (gem).
        kappa: κ, amplifies the proxy (gem, Eq. 27).
        epsilon: ε in the scaling factor's denominator (gem, Eq. 19).
        pi_max: Upper bound of the scaling factor π (gem).
        snapshot: The snapshot convention (gem).
        batch_size: Samples per gradient.
        epochs: How often the training data is gone through; 0 for no limit but `steps`.
        steps: Commits that each worker contributes at most; 0 for no limit but `epochs`. With both 0 the run has no
            end.
        shards: How an epoch's samples are shared out.
        shard_size: Samples per shard; a batch has no more.
        seed: Of the shuffling and of the workers' own randomness.
        rule_options: The rule's own settings, "name=value", separated by blanks.
        local_steps: λ, steps of SGD that a worker makes by itself for each commit.
        local_momentum: Of those steps.
        weight_decay: Workers add so many times θ to each gradient.
        schedule: How the learning rate follows the version; `gem_api.schedule` has the equations.
        warmup_versions: Over so many it rises first.
        decay_versions: Between two steps of the schedule, or of the whole cosine.
        decay_factor: What a step multiplies it by, or where the cosine ends.
    """

    rule: str = "gem"
    learning_rate: float = 0.05
    momentum: float = 0.9
    kappa: float = 1.0
    epsilon: float = 1e-16
    pi_max: float = 5.0
    snapshot: str = "after"
    batch_size: int = 64
    epochs: int = 1
    steps: int = 0
    shards: str = "partition"
    shard_size: int = SHARD_SIZE
    seed: int = 0
    rule_options: str = ""
    local_steps: int = 1
    local_momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_versions: int = 0
    decay_versions: int = 0
    decay_factor: float = 0.1

    @property
    def endless(self) -> bool:
        """Whether nothing but the user ends the run."""
        return not self.epochs and not self.steps

    def require_carried(self) -> None:
        """Raises ValueError if the contract cannot carry a value: workers could not be told of it."""
        for name, most in MAX_VALUES.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"--{name.replace('_', '-')} must lie in [0, {most}], not at {getattr(self, name)}")
        for name in ("rule", "rule_options"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError:
                raise ValueError(f"--{name.replace('_', '-')} is not valid UTF-8: {getattr(self, name)!a}") from None

    def with_defaults(self, given: Collection[str]) -> Hyperparameters:
        """The settings of a new run, of which the user gave those named: the others' defaults depend on these, for gem."""
        defaults: dict[str, Any] = {}
        if self.rule == "gem" and self.snapshot == "reference":
            defaults |= REFERENCE_DEFAULTS
        if self.rule == "gem" and "proxy=adam" in self.rule_options.split():
            defaults |= ADAM_DEFAULTS
        return replace(self, **{name: value for name, value in defaults.items() if name not in given})

    def to_message(self) -> pb.Hyperparameters:
        """The wire form."""
        fields = asdict(self)
        fields["snapshot"] = pb.SnapshotConvention.Value(f"SNAPSHOT_CONVENTION_{self.snapshot.upper()}")
        fields["shards"] = pb.ShardMode.Value(f"SHARD_MODE_{self.shards.upper()}")
        return pb.Hyperparameters(**fields)

    @classmethod
    def from_message(cls, message: pb.Hyperparameters) -> Hyperparameters:
        """Reads the wire form."""
        fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
        fields["snapshot"] = pb.SnapshotConvention.Name(message.snapshot).removeprefix("SNAPSHOT_CONVENTION_").lower()
        fields["shards"] = pb.ShardMode.Name(message.shards).removeprefix("SHARD_MODE_").lower()
        return cls(**fields)


def default_shard_size(batch_size: int) -> int:
    """Samples per shard if nobody says how many: whole batches, for a batch never straddles two shards."""
    return -(-SHARD_SIZE // batch_size) * batch_size
