"""The run's settings: held by the server, handed to every worker, named the same everywhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gem_api.v1 import training_pb2 as pb

RULES = ("gem", "downpour", "adaptive")
SNAPSHOTS = ("after", "paper", "reference")
SHARD_MODES = ("partition", "replicate")


@dataclass(frozen=True)
class Hyperparameters:
    """The run's settings.

    Attributes:
        rule: The update rule.
        learning_rate: η.
        momentum: μ of the proxy (gem).
        kappa: κ, amplifies the proxy (gem, Eq. 27).
        epsilon: ε in the scaling factor's denominator (gem, Eq. 19).
        pi_max: Upper bound of the scaling factor π (gem).
        snapshot: The snapshot convention (gem).
        batch_size: Samples per gradient.
        epochs: How often the training data is gone through; 0 for no limit but `steps`.
        steps: Commits that each worker contributes at most; 0 for no limit but `epochs`.
        shards: How an epoch's samples are shared out.
        shard_size: Samples per shard.
        seed: Of the shuffling and of the workers' own randomness.
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
    shard_size: int = 256
    seed: int = 0

    def to_message(self) -> pb.Hyperparameters:
        fields = asdict(self)
        fields["snapshot"] = pb.SnapshotConvention.Value(f"SNAPSHOT_CONVENTION_{self.snapshot.upper()}")
        fields["shards"] = pb.ShardMode.Value(f"SHARD_MODE_{self.shards.upper()}")
        return pb.Hyperparameters(**fields)

    @classmethod
    def from_message(cls, message: pb.Hyperparameters) -> Hyperparameters:
        fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
        fields["snapshot"] = pb.SnapshotConvention.Name(message.snapshot).removeprefix("SNAPSHOT_CONVENTION_").lower()
        fields["shards"] = pb.ShardMode.Name(message.shards).removeprefix("SHARD_MODE_").lower()
        return cls(**fields)
