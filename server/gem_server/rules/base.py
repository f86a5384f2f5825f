"""What every update rule is: a step from (θ, gradient, the worker's own buffers) to a new θ, and facts about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from gem_api.layout import Layout, Vector
from gem_api.update_kind import UpdateKind

from gem_server.rules.bins import bin_middles

Buffers = dict[str, Vector]

# The largest |value| taken in: 1e30 leaves float32 (3.4e38) room for every sum and product that a rule forms of it.
MAX_MAGNITUDE = 1e30
# The most that one commit moves an element of θ: less than half the gap between float32's largest numbers (2¹⁰³ ≈ 1.01e31), so
# that no sum of such moves is ever rounded up to an infinity.
MAX_MOVE = 8e30
NO_REPLY: Vector = np.empty(0, np.float32)


@dataclass(frozen=True)
class PiFacts:
    """What the scaling factor π did in one commit, over all parameters.

    The energies are sums over all parameters. What comes of the histogram (`counts`, the medians, the mean, the shares at the
    bounds) is counted over all parameters of a tensor smaller than 2,048, and over a systematic sample of a larger one: at
    least 1,024 of its parameters, one in 64 where it has 65,536 or more. `rules/fused.py` gives the standard error.

    Attributes:
        counts: int64, shape (bins,): histogram of π; adds up to P. The first bin holds π = 0 alone, the last π = π_max alone.
        edges: float32, shape (bins,): the bins' lower edges.
        median: Median of π, inside its bin interpolated.
        tensor_medians: float32, shape (tensors,): median of π per tensor.
        proxy_energy: ½Σ(κ·m)² (Eq. 15).
        central_energy: ½Σ(θ_{t+1} − s)² (Eq. 16).
    """

    counts: npt.NDArray[np.int64]
    edges: npt.NDArray[np.float32]
    median: float
    tensor_medians: npt.NDArray[np.float32]
    proxy_energy: float
    central_energy: float

    @property
    def middles(self) -> npt.NDArray[np.float64]:
        """The value that represents each bin: float64, shape (bins,). It is within 1/32 (relative) of any in the bin."""
        return bin_middles(float(self.edges[-1]))

    @property
    def mean(self) -> float:
        """Mean of π over the counted parameters, with a relative error of at most 1/32."""
        return float(self.counts @ self.middles / self.counts.sum())

    @property
    def zero_ratio(self) -> float:
        """Share of parameters with π = 0."""
        return float(self.counts[0] / self.counts.sum())

    @property
    def max_ratio(self) -> float:
        """Share of parameters with π = π_max."""
        return float(self.counts[-1] / self.counts.sum())


class Threads(Protocol):
    """Runs the parts that a pass over θ is split into."""

    def parts(self, size: int) -> int:
        """The number of parts for a pass over `size` elements."""

    def run(self, work: Callable[[int], None], parts: int) -> None:
        """Calls work(0) … work(parts - 1), and returns when all of them have returned."""


class Caller:
    """The caller alone."""

    def parts(self, size: int) -> int:
        return 1

    def run(self, work: Callable[[int], None], parts: int) -> None:
        for part in range(parts):
            work(part)


@dataclass
class Shared:
    """What a rule remembers of the run as a whole; saved with it.

    Attributes:
        buffers: Those of the rule's `shared`: float32, shape (P,); they start at zero.
        numbers: Those of the rule's `numbers`.
    """

    buffers: Buffers = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleInput:
    """What a rule is told of a commit, beside the arrays.

    Attributes:
        staleness: τ, commits applied since the worker's pull (Eq. 2).
        version: t, commits applied so far.
        commits: The worker's earlier commits under its lease.
        factor: What the schedule multiplies η by at this version, in [0, 1].
        shared: What the rule remembers of the run; it may change it.
    """

    staleness: int
    version: int = 0
    commits: int = 0
    factor: float = 1.0
    shared: Shared = field(default_factory=Shared)


class UpdateRule(ABC):
    """How a commit moves the central variable. Stateless: what it remembers of a worker lies in that worker's buffers, and what
    it remembers of the run in those that all share.

    A rule is a frozen dataclass; its fields are its settings. `--learning-rate` and the like set the fields of those names,
    `--rule-options name=value` any other. `__post_init__` raises ValueError for a value that it can't take.

    A worker may have an extra buffer "answer", float32, shape (P,), in shared memory: the rule then writes the θ of its next
    gradient there too, in the same pass.

    Attributes:
        name: What the rule is called on the command line.
        buffers: Names of the float32 buffers of shape (P,) that it keeps for each worker; they start at zero.
        shared: Names of those that it keeps once for the whole run.
        numbers: Numbers that it keeps for the whole run, with their first values.
        reply_buffer: The buffer that is sent to the worker: the θ that its next gradient is computed on.
        replies_before: Whether that is the θ before the worker's own commit (else after it).
        kind: The update that it takes: a gradient, or the change that local steps made to the worker's parameters.
        reads_once: Whether `apply` is safe if the worker writes to the gradient meanwhile; if not, it gets a copy.
        temporaries: Largest number of arrays of shape (P,) that `apply` allocates.
    """

    name: ClassVar[str] = ""
    buffers: tuple[str, ...] = ("snapshot",)
    shared: tuple[str, ...] = ()
    numbers: Mapping[str, float] = MappingProxyType({})
    reply_buffer: str = "snapshot"
    replies_before: bool = False
    reads_once: bool = False
    temporaries: int = 0

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """η."""

    @property
    def kind(self) -> UpdateKind:
        return "gradient"

    @cached_property
    def threads(self) -> Threads:
        """What `apply` is split over: one part, the caller's, unless `use_threads` says otherwise."""
        return Caller()

    def use_threads(self, threads: Threads) -> None:
        """Splits `apply` from now on. The bits of θ and the buffers, and the counts, do not depend on it."""
        vars(self)["threads"] = threads  # past the lock of a frozen dataclass, as cached_property does

    @cached_property
    def largest(self) -> np.float32:
        """The largest |g|, or element of a delta, taken in."""
        return largest(self.learning_rate if self.kind == "gradient" else 1.0)

    def accepts(self, rule_input: RuleInput) -> bool:
        """Whether to apply a commit. If not, the worker gets the present θ and the version stays."""
        return True

    def pull(self, theta: Vector, buffers: Buffers) -> None:
        """The worker reads θ: keep what it will compute its gradient on."""
        for name in {"snapshot", "answer"} & buffers.keys():
            np.copyto(buffers[name], theta)

    def first_pull(self, theta: Vector, buffers: Buffers) -> None:
        """The same, before the worker's first commit under its lease."""
        self.pull(theta, buffers)

    @abstractmethod
    def apply(self, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> PiFacts | None:
        """Applies one commit in place.

        Args:
            layout: Where the tensors lie.
            theta: The central variable θ, float32, shape (P,).
            update: The gradient or delta, float32, shape (P,), without an element that is no number or beyond `largest`. With
                `reads_once` such an element may be there and counts as 0: the worker may write to it meanwhile.
            buffers: The worker's buffers: those of `buffers`, and "answer" where the worker has one.
            rule_input: Staleness, version and the rule's shared state.

        Returns:
            Facts about π, or None for a rule without one.
        """

    def scale(self, rule_input: RuleInput, pi: PiFacts | None) -> float:
        """The mean factor that a commit's Δ was multiplied by, from what `apply` was given and answered."""
        return 1.0 if pi is None else pi.mean


class ArrayRule(UpdateRule):
    """A rule written with NumPy: subclasses only define `move`."""

    temporaries: int = 4

    @abstractmethod
    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        """Moves θ, in place, by a commit; arguments as for `apply`."""

    def apply(self, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        self.move(theta, update, buffers, rule_input)
        self.pull(theta, buffers)


def largest(scale: float) -> np.float32:
    """The largest |v| taken in of values that a rule multiplies by `scale`."""
    return np.float32(min(MAX_MAGNITUDE / scale, MAX_MAGNITUDE))


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`. For the rules' hyper-parameters."""
    if not condition:
        raise ValueError(message)


def require_rate(learning_rate: float) -> None:
    """Raises ValueError unless η is one that float32 can express: 1e-30 to 1000."""
    require(1e-30 <= learning_rate <= 1e3, f"the learning rate must lie in [1e-30, 1000], not {learning_rate}")
