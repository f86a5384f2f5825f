"""The optimizer that a worker brings to a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gem_api.schedule import Schedule
from gem_api.v1 import training_pb2 as pb


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer that a worker brings. In a new run whose server names none, the first worker's choice counts.

    Attributes:
        optimizer: "worker" if the worker makes its own steps and commits what they changed. Otherwise the optimizer that the
            server shall keep for all workers, one of `hyperparameters.OPTIMIZERS`.
        options: Its options, as in `Hyperparameters.optimizer_options`.
        learning_rate: η; None: the server's.
        weight_decay: λ; None: the server's.
        schedule: How η changes with the commits of all workers; None: the server's.
    """

    optimizer: str
    options: str = ""
    learning_rate: float | None = None
    weight_decay: float | None = None
    schedule: Schedule | None = None

    def to_message(self) -> pb.OptimizerChoice:
        """The wire form."""
        return pb.OptimizerChoice(
            optimizer=self.optimizer,
            options=self.options,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            schedule=pb.Schedule(**asdict(self.schedule)) if self.schedule else None,
        )

    @classmethod
    def from_message(cls, message: pb.OptimizerChoice) -> OptimizerChoice:
        """Reads the wire form."""
        rate = message.learning_rate if message.HasField("learning_rate") else None
        decay = message.weight_decay if message.HasField("weight_decay") else None
        schedule = Schedule.of(message.schedule) if message.HasField("schedule") else None
        return cls(message.optimizer, message.options, rate, decay, schedule)
