"""The hyper-parameters of a run, each declared once. The server holds them and sends them to every worker.

Everything else is derived from the declarations below: command-line options and their --help, the settings of --rule and
--schedule, the ranges that are checked, what a resumed run may change, what `gem-ctl status` shows, and the tables of
docs/settings.md. The message `Hyperparameters` in `v1/training.proto` lists the names too; a test sends each value both ways.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gem_api.rules import OPTIMIZERS, RULES
from gem_api.v1 import training_pb2 as pb

SNAPSHOTS = ("after", "paper", "reference")
SHARD_MODES = ("partition", "replicate")
_NOT_SGD = tuple(OPTIMIZERS)[1:]
_SHARED = tuple(name for name, arrays in OPTIMIZERS.items() if arrays)  # of the server, with a memory of gradients
_PAPERS = ("momentum", "snapshot")  # settings of rule gem that mean nothing around another optimizer than SGD
SCHEDULES = ("constant", "step", "cosine", "onecycle")
NO_AVERAGE = "this run keeps no average of θ: start its server with --average DECAY, such as 0.999; a resumed run may begin one"
SHARD_SIZE = 256  # the default; a larger batch raises it

_MAX_UINT32 = (1 << 32) - 1
_MAX_COUNT = (1 << 63) - 1  # checkpoints store integers in 63 bits


@dataclass(frozen=True)
class Range:
    """The allowed numbers: at least `ge` or greater than `gt`, and at most `le` or less than `lt`. None: no such bound."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, number: object) -> bool:
        return (
            isinstance(number, int | float)
            and abs(number) <= sys.float_info.max  # not NaN, and not an integer that no float can hold
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def __str__(self) -> str:
        words = {"at least": self.ge, "greater than": self.gt, "at most": self.le, "less than": self.lt}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The declaration of a hyper-parameter, besides its name, type and default.

    Attributes:
        heading: The heading that --help shows its option under. Empty: it has no option of its own.
        help: The text that users read, with the unit.
        option: The option that it is a setting of: "rule", "optimizer" or "schedule"; empty: it stands for itself.
        key: Its name among that option's settings; empty: it holds all settings without a declaration.
        values: The allowed numbers or words; None allows any text.
        fixed: Whether a resumed run must keep it, because the workers' buffers or the shard ledger depend on it.
        workers_use: Whether workers compute with it. After a change they must register again.
        other_defaults: Defaults if another hyper-parameter contains a word: {(other, word): default}.
        in_step: Whether those hold only if workers can be kept in step: see `Hyperparameters.in_step`.
        status: A label and a format; `gem-ctl status` shows the value with them if it is not the default.
    """

    heading: str
    help: str
    option: str = ""
    key: str = ""
    values: Range | tuple[str, ...] | None = None
    fixed: bool = False
    workers_use: bool = False
    other_defaults: Mapping[tuple[str, str], float | str] = field(default_factory=dict)
    in_step: bool = False
    status: tuple[str, str] | None = None


def _declare(default: Any, heading: str = "", **more: Any) -> Any:
    return field(default=default, metadata={"declaration": Declaration(heading=heading, **more)})


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The hyper-parameters of a run, in the order in which checkpoints and the message list them."""

    # fmt: off
    rule: str = _declare("gem", "Rule", fixed=True,
        help=f"The update rule, which applies commits: {', '.join(RULES)}, or your own as module:Class. Settings follow the "
        "name: gem:kappa=2,momentum=0.9.")
    # Rates that suit one worker alone: those of the other optimizers are much smaller than SGD's.
    learning_rate: float = _declare(0.05, "Rule", values=Range(gt=0), workers_use=True,
        other_defaults={("rule_options", "proxy=adam"): 0.003, ("optimizer", "adam"): 0.001, ("optimizer", "adamw"): 0.001,
                        ("optimizer", "lion"): 0.0001},
        help="Learning rate η.")
    momentum: float = _declare(0.9, option="rule", key="momentum", values=Range(ge=0, lt=1),
        help="Momentum μ: of the proxy (gem), or of each worker (dana).")
    kappa: float = _declare(1.0, option="rule", key="kappa", values=Range(gt=0),
        other_defaults={("optimizer", name): 1.5 for name in _NOT_SGD},
        help="Amplification κ of the proxy (gem). With another optimizer than sgd it is multiplied by √n (docs/method.md).")
    epsilon: float = _declare(1e-16, option="rule", key="epsilon", values=Range(gt=0),
        other_defaults={("snapshot", "reference"): 1e-12},  # the authors' code
        help="ε in the denominator of the scaling factor π (gem).")
    # A step of Adam does not shrink with the gradient, but Δ does: π must be free to grow as 1/|g|.
    # A commit never moves further than the optimizer's own step.
    pi_max: float = _declare(5.0, option="rule", key="pi_max", values=Range(gt=0),
        other_defaults={("rule_options", "proxy=adam"): 1e6} | {("optimizer", name): 1.0 for name in _NOT_SGD},
        help="Upper bound of the scaling factor π (gem).")
    snapshot: str = _declare("after", option="rule", key="snapshot", values=SNAPSHOTS, fixed=True,
        help="Which θ is a worker's snapshot (gem, SGD). after: θ after the worker's own commit; paper: as in the paper's "
        "Algorithm 1; reference: as in the authors' code.")
    batch_size: int = _declare(64, "Run", values=Range(ge=1, le=1_000_000), fixed=True, workers_use=True,
        help="Samples per gradient.")
    epochs: int = _declare(1, "Run", values=Range(ge=0, le=_MAX_UINT32),
        help="Passes over the training data; 0: only --steps limits the run.")
    steps: int = _declare(0, "Run", values=Range(ge=0, le=_MAX_COUNT), workers_use=True,
        help="Maximum commits of each worker over the whole run; 0: only --epochs limits the run.")
    shards: str = _declare("partition", "Run", values=SHARD_MODES, fixed=True,
        help="partition: the workers share the samples of an epoch; replicate: every worker gets all.")
    shard_size: int = _declare(SHARD_SIZE, values=Range(ge=1, le=1_000_000), fixed=True,
        help="Samples that a worker is given at a time, at least the batch size.")
    seed: int = _declare(0, "Run", values=Range(ge=0, le=_MAX_COUNT), fixed=True, workers_use=True,
        help="Seed for the initial θ, the order of the samples and the workers' random numbers.")
    # The room of the first commits, which nobody can foresee: docs/method.md.
    rule_options: str = _declare("", option="rule", fixed=True,
        other_defaults={("optimizer", name): "growth=10" for name in _SHARED}, in_step=True, status=("options", "{}"),
        help="The rule's other settings, NAME=VALUE separated by spaces, such as 'alpha=0.1' for aeasgd.")
    local_steps: int = _declare(1, "Steps of the workers", values=Range(ge=1, le=10_000), fixed=True, workers_use=True,
        status=("local", "λ {} steps"),
        help="Steps (λ) that a worker takes by itself before each commit.")
    local_momentum: float = _declare(0.0, values=Range(ge=0, lt=1), workers_use=True, status=("nesterov", "{:g}"),
        help="Nesterov momentum of the local steps.")
    weight_decay: float = _declare(0.0, "Steps of the workers", values=Range(ge=0, le=1),
        other_defaults={("optimizer", "adamw"): 0.01}, workers_use=True, status=("weights", "decay {:g}"),  # PyTorch's default
        help="Workers add this value times θ to each gradient; with adamw and lion, the server applies it instead.")
    schedule: str = _declare("constant", "Rule", values=SCHEDULES, workers_use=True,
        help="How the learning rate changes with the commits, each counted as its share of a batch, such as "
        "cosine:versions=9400,warmup=100. step: it is multiplied by factor every `versions` commits; cosine: it falls to that "
        "share within `versions` commits; onecycle: as cosine, and its warm-up is a cosine too.")
    warmup_versions: int = _declare(0, option="schedule", key="warmup", values=Range(ge=0, le=_MAX_COUNT), workers_use=True,
        help="Commits over which the learning rate first rises to its value.")
    warmup_factor: float = _declare(0.0, option="schedule", key="warmup_factor", values=Range(ge=0, le=1), workers_use=True,
        help="Share of the learning rate at which the warm-up begins; 0: one step above 0.")
    decay_versions: int = _declare(0, option="schedule", key="versions", values=Range(ge=0, le=_MAX_COUNT), workers_use=True,
        help="Commits between two drops (step), or until the end of the fall (cosine, onecycle).")
    decay_factor: float = _declare(0.1, option="schedule", key="factor", values=Range(ge=0, le=1), workers_use=True,
        help="Factor of each drop (step), or the final share of the learning rate (cosine, onecycle).")
    optimizer: str = _declare("sgd", "Rule", values=tuple(OPTIMIZERS), fixed=True, workers_use=True, status=("optimizer", "{}"),
        help="The optimizer whose steps the rules gem, downpour and adaptive apply. sgd, adam, adamw, lion: one on the server "
        "for all workers, with settings such as adamw:beta2=0.99; worker: each worker's own, and commits hold what its steps "
        "changed.")
    optimizer_options: str = _declare("", option="optimizer", fixed=True,
        help="The optimizer's settings, NAME=VALUE separated by spaces: beta1 and beta2 for adam, adamw and lion, epsilon for "
        "adam and adamw.")
    batch_variation: float = _declare(0.0, values=Range(ge=0, le=0.9), workers_use=True, status=("variation", "batches ±{:g}"),
        help="How much batch sizes vary at random: from (1 − this) to (1 + this) times --batch-size. 0.9 keeps many equal "
        "workers out of lockstep.")
    smallest_share: float = _declare(1.0, values=Range(ge=1 / 64, le=1),
        other_defaults={("optimizer", name): 1 / 16 for name in _SHARED}, in_step=True, workers_use=True,
        status=("shares", "batches from ×{:g}"),
        help="The smallest share of a batch for slow workers: they get fewer samples for a gradient, so that all take about as "
        "long as the fastest, and the gradient counts by its share. 1: all batches are whole, the default with another rule "
        "than gem, local steps or batch_variation.")
    reply_wait: float = _declare(0.0, values=Range(ge=0, le=0.5),
        other_defaults={("optimizer", name): 0.15 for name in _SHARED}, in_step=True,
        status=("wait", "replies wait ≤ ×{:g} of a step"),
        help="How long a reply may wait for expected commits in the first rounds of a run, as a share of the worker's own "
        "step. 0: not at all, the default with another rule than gem, local steps or batch_variation.")
    average: float = _declare(0.0, "Rule", values=Range(ge=0, lt=1), status=("average", "β {:g}"),
        help="Keep an average of θ with this decay β per commit of any worker, such as 0.999. It takes 4 bytes a parameter, "
        "and evaluations are of it. 0: none.")
    # fmt: on

    @property
    def default_shard_size(self) -> int:
        """Samples per shard if the user gives none. A batch never spans two shards, so they are a multiple of the batch size.
        If batches vary, they are enough for four commits, because all shards take equally long."""
        commit = self.batch_size * (self.local_steps if self.batch_variation else 1)
        return -(-max(SHARD_SIZE, 4 * commit if self.batch_variation else 0) // commit) * commit

    @property
    def endless(self) -> bool:
        """Whether the run has no limit: only the user ends it."""
        return not self.epochs and not self.steps

    @property
    def in_step(self) -> bool:
        """Whether a new run may have what keeps workers in step by default: its batches differ for no other reason."""
        return self.rule == "gem" and self.local_steps == 1 and not self.batch_variation

    def require_valid(self) -> None:
        """Raises ValueError, naming the option, for a value of the wrong type or outside of its declared range."""
        for name in DECLARATIONS:
            require_valid(name, getattr(self, name))

    def with_defaults(self, given: Collection[str]) -> Hyperparameters:
        """Applies `other_defaults` to the hyper-parameters of a new run, except to those that the user has given."""
        changes: dict[str, Any] = {}
        for name in DECLARATIONS.keys() - set(given):
            declared = DECLARATIONS[name]
            for (other, word), default in declared.other_defaults.items():
                applies = self.in_step if declared.in_step else other == "optimizer" or self.rule == "gem"
                if applies and word in getattr(self, other).split():
                    changes[name] = default
        return replace(self, **changes)

    def require_used(self, given: Collection[str]) -> None:
        """Raises ValueError if the user has given a setting of the paper's rule, and the run has another optimizer."""
        if self.rule != "gem" or self.optimizer == "sgd":
            return
        for name in _PAPERS:
            if name in given and getattr(self, name) != DEFAULTS[name]:
                raise ValueError(
                    f"--rule gem uses {DECLARATIONS[name].key} with SGD alone, not with --optimizer {self.optimizer}: leave it "
                    "out, or give --optimizer sgd"
                )

    def to_message(self) -> pb.Hyperparameters:
        """The wire form."""
        values = asdict(self)
        values["snapshot"] = pb.SnapshotConvention.Value(f"SNAPSHOT_CONVENTION_{self.snapshot.upper()}")
        values["shards"] = pb.ShardMode.Value(f"SHARD_MODE_{self.shards.upper()}")
        return pb.Hyperparameters(**values)

    @classmethod
    def from_message(cls, message: pb.Hyperparameters) -> Hyperparameters:
        """Reads the wire form."""
        values = {each.name: getattr(message, each.name) for each in message.DESCRIPTOR.fields}
        values["snapshot"] = pb.SnapshotConvention.Name(message.snapshot).removeprefix("SNAPSHOT_CONVENTION_").lower()
        values["shards"] = pb.ShardMode.Name(message.shards).removeprefix("SHARD_MODE_").lower()
        values["smallest_share"] = message.smallest_share or 1.0  # an older server has none
        return cls(**values)


DECLARATIONS: dict[str, Declaration] = {each.name: each.metadata["declaration"] for each in fields(Hyperparameters)}
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Hyperparameters)}
FIXED = tuple(name for name, declared in DECLARATIONS.items() if declared.fixed)
USED_BY_WORKERS = tuple(name for name, declared in DECLARATIONS.items() if declared.workers_use)


def decay_of_workers(settings: Hyperparameters) -> float:
    """The weight decay that workers add to their gradients: 0 if an optimizer decays the weights itself."""
    return 0.0 if settings.optimizer in ("adamw", "lion", "worker") else settings.weight_decay


def flag(name: str) -> str:
    """A hyper-parameter as a user writes it: "--learning-rate"; "--rule …:kappa", a setting of an option; "shard_size", a key
    of the settings file."""
    declared = DECLARATIONS[name]
    if declared.option:
        return f"--{declared.option} …:{declared.key}" if declared.key else f"--{declared.option}"
    return "--" + name.replace("_", "-") if declared.heading else name


def require_valid(name: str, value: Any) -> None:
    """Raises ValueError for a hyper-parameter of the wrong type or outside of its declared range."""
    allowed, kind, name = DECLARATIONS[name].values, type(DEFAULTS[name]), flag(name)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ValueError(f"{name} must be of type {kind.__name__}, not {str(value)[:50]!r}")
    if isinstance(allowed, Range) and value not in allowed:
        raise ValueError(f"{name} must be {allowed}, not {str(value)[:50]}")
    if isinstance(allowed, tuple) and value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is not valid UTF-8: {value!a}") from None
