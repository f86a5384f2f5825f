"""The base of every update rule: a function from θ, a gradient and the worker's buffers to a new θ, and facts about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.update_kind import UpdateKind

from gem_server.rules.bins import bin_middles
from gem_server.rules.threads import Threads

Buffers = dict[str, Vector]

# The largest |value| accepted. With 1e30, no sum or product that a rule computes exceeds float32's maximum (3.4e38).
MAX_MAGNITUDE = 1e30
# The largest movement of an element of θ in one commit. It is less than half the gap between float32's largest numbers (2¹⁰³ ≈
# 1.01e31), so that no sum of such movements is ever rounded up to infinity.
MAX_MOVE = 8e30
_MOST = 4  # of n for each worker
NO_REPLY: Vector = np.empty(0, np.float32)


@dataclass(frozen=True)
class PiStatistics:
    """Statistics of the scaling factor π in one commit.

    The energies are sums over all parameters. The histogram, and what is derived from it (medians, mean, shares at the bounds),
    counts parameters whose gradient is not 0: all of a tensor with fewer than 2,048 elements. Of a larger tensor it counts a
    systematic sample: at least 1,024 parameters, and one in 64 if there are 65,536 or more. `rules/fused.py` gives the standard
    error.

    Attributes:
        counts: int64, shape (bins,): histogram of at most P values. The first bin holds π = 0 alone, the last π = π_max alone.
        edges: float32, shape (bins,): the bins' lower edges.
        median: Median of π, interpolated inside its bin.
        tensor_medians: float32, shape (tensors,): median of π per tensor.
        proxy_energy: ½Σ(κ·m)² (Eq. 15); with another optimizer than SGD ½Σ(κ·√n·Δ)².
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

    @cached_property
    def mean(self) -> float:
        """Mean of π over the counted parameters, with a relative error of at most 1/32."""
        return float(self.counts @ self.middles) / self._total

    @property
    def zero_ratio(self) -> float:
        """Share of parameters with π = 0: others moved them further than the proxy would. No other parameter exceeds it."""
        return int(self.counts[0]) / self._total

    @property
    def max_ratio(self) -> float:
        """Share of parameters with π = π_max."""
        return int(self.counts[-1]) / self._total

    @cached_property
    def _total(self) -> int:
        return max(1, int(self.counts.sum()))


@dataclass
class Shared:
    """A rule's state for the whole run, saved with it.

    Attributes:
        buffers: The buffers that the rule names in `shared`: float32, shape (P,), initially zero.
        numbers: The numbers that the rule names in `numbers`.
    """

    buffers: Buffers = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleInput:
    """A rule's input with a commit, besides the arrays.

    Attributes:
        staleness: τ, commits applied since the worker's pull (Eq. 2).
        version: t, commits applied so far.
        commits: Number of the worker's earlier commits under its lease.
        factor: The schedule's factor for η at this version, in [0, 1].
        workers: The number of workers that hold a lease.
        shared: The rule's state for the whole run; the rule may change it.
        eta_change: η_t divided by η at the worker's last commit; 1 if it has none, or if η was nearly 0 then.
        weight: w, the share of a whole batch that the gradient was computed on: what the commit counts.
        passed: The weights of all commits since the worker's last one, or since it pulled; None: 1 for each of `staleness`.
        meanwhile: Those of the commits while the worker computed: since it got its θ, which a held reply brings later. None: as
            `passed`.
    """

    staleness: int
    version: int = 0
    commits: int = 0
    factor: float = 1.0
    workers: int = 1
    shared: Shared = field(default_factory=Shared)
    eta_change: float = 1.0
    weight: float = 1.0
    passed: float | None = None
    meanwhile: float | None = None

    @property
    def count(self) -> float:
        """n, whole batches that shared the round of this commit, with itself: τ + 1 if all are whole. At least 1, and at most
        four for each worker: with overlap n is two for each, and one that was silent for long should not count as many."""
        count = (self.staleness if self.passed is None else self.passed) + self.weight
        most = _MOST * self.workers
        return 1.0 if count < 1 else count if count < most else most

    @property
    def delay(self) -> float:
        """The weights that were committed while the worker computed, with the same bound. If no reply was held and all batches
        are whole, that is n − 1."""
        passed = self.staleness if self.passed is None else self.passed
        meanwhile, most = passed if self.meanwhile is None else self.meanwhile, _MOST * self.workers - 1
        return meanwhile if meanwhile < most else most


class UpdateRule(ABC):
    """The change that a commit makes to the central variable θ. A rule object is stateless: its state for a worker lies in that
    worker's buffers, and its state for the run in `Shared`.

    A rule is a frozen dataclass; its fields are its settings. Options such as `--learning-rate` set the fields of the same
    name, `--rule NAME:KEY=VALUE` any other. `__post_init__` raises ValueError for an invalid value.

    A worker may have an extra buffer "answer", float32, shape (P,), in shared memory. The rule then writes the θ for the
    worker's next gradient there too, in the same pass.

    Attributes:
        name: The rule's name on the command line.
        buffers: Names of the float32 buffers of shape (P,) that it keeps for each worker; initially zero.
        shared: Names of the buffers that it keeps once for the whole run.
        numbers: Numbers that it keeps for the whole run, with their initial values.
        reply_buffer: The buffer that is sent to the worker: the θ for its next gradient.
        replies_before: Whether that is θ before the worker's own commit; otherwise it is θ after it.
        replies_may_wait: Whether a reply may be made later than its commit, with the θ of then: see `release`.
        kind: The update that it takes: a gradient, or the change that local steps made to the worker's parameters.
        reads_once: Whether `apply` is safe if the worker writes to the gradient at the same time. If not, it gets a copy.
        temporaries: Maximum number of arrays of shape (P,) that `apply` allocates.
        weighs: Whether it counts a commit by its `weight`, the share of a whole batch that its gradient was computed on. If
            not, all batches must be whole.
        by_element: Whether each element of θ and of the buffers depends only on the same element of the update, θ and the
            buffers, and on numbers that `RuleInput` gives. Only such a rule can run on several servers that each hold a range
            of θ.
    """

    name: ClassVar[str] = ""
    buffers: tuple[str, ...] = ("snapshot",)
    shared: tuple[str, ...] = ()
    numbers: Mapping[str, float] = MappingProxyType({})
    reply_buffer: str = "snapshot"
    replies_before: bool = False
    replies_may_wait: bool = True
    reads_once: bool = False
    temporaries: int = 0
    weighs: bool = False
    by_element: bool = False
    kind: UpdateKind = "gradient"

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The learning rate η."""

    def set_traits(self, **traits: object) -> None:
        """Sets attributes that follow from the settings. The dataclass is frozen: call it in `__post_init__`."""
        vars(self).update(traits)

    @cached_property
    def threads(self) -> Threads:
        """The threads that `apply` uses: only the caller's, unless `use_threads` sets others."""
        return Threads(1)

    def use_threads(self, threads: Threads) -> None:
        """Splits `apply` over these threads. The bits of θ and the buffers, and the counts, do not depend on it."""
        self.set_traits(threads=threads)

    @cached_property
    def largest(self) -> np.float32:
        """The largest |g|, or |element| of a delta, that is accepted."""
        return largest(self.learning_rate if self.kind == "gradient" else 1.0)

    @property
    def caution(self) -> str:
        """A warning of settings that are valid, but probably not meant; empty if there is nothing to say."""
        return ""

    def require_fitting(self, layout: Layout) -> None:
        """Raises ValueError if the rule can't train this layout. By default a rule that takes gradients has one learning rate;
        in a run with deltas, workers apply those of the tensors."""
        if self.kind == "gradient":
            require_uniform(layout, f"rule {self.name or type(self).__name__}")

    def accepts(self, rule_input: RuleInput) -> bool:
        """Whether to apply a commit. If not, it is discarded: the worker gets the current θ, and the version does not
        change."""
        return True

    def pull(self, theta: Vector, buffers: Buffers) -> None:
        """The worker reads θ: stores θ in its snapshot, as it will compute its next gradient there."""
        for name in {"snapshot", "answer"} & buffers.keys():
            np.copyto(buffers[name], theta)

    def first_pull(self, theta: Vector, buffers: Buffers) -> None:
        """As `pull`, before the worker's first commit under its lease."""
        self.pull(theta, buffers)

    def release(self, theta: Vector, buffers: Buffers, source: Vector | None, ratio: float) -> None:
        """The worker, whose reply was held, reads θ: as `pull`, unless the rule sends another θ ahead of it.

        Args:
            theta, buffers: As for `apply`.
            source: The snapshot of the worker whose commit was the last, float32, shape (P,); it may be this worker's own. None
                if there is none.
            ratio: How far this worker's snapshot lies ahead of θ, if `source` lies 1 ahead: see `ahead`.
        """
        self.pull(theta, buffers)

    def ahead(self, rule_input: RuleInput, released: bool = False) -> float:
        """The distance of the worker's snapshot ahead of θ after its commit, or once its held reply is released; 0 if it is θ.
        The unit is the rule's."""
        return 0.0

    @abstractmethod
    def apply(
        self, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput
    ) -> PiStatistics | None:
        """Applies one commit in place.

        Args:
            layout: The tensors' places in θ.
            theta: The central variable θ, float32, shape (P,).
            update: The gradient or delta, float32, shape (P,), without NaN and with no |element| beyond `largest`. With
                `reads_once` the worker may write to it at the same time; elements that break this rule then count as 0.
            buffers: The worker's buffers: those named in `buffers`, and "answer" if the worker has one.
            rule_input: Staleness, version and the rule's shared state.

        Returns:
            Facts about π, or None for a rule without one.
        """

    def scale(self, rule_input: RuleInput, pi: PiStatistics | None) -> float:
        """The mean factor that a commit's Δ was multiplied by, from `apply`'s input and result."""
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
    """The largest |v| accepted, for values that a rule multiplies by `scale`."""
    return np.float32(min(MAX_MAGNITUDE / scale, MAX_MAGNITUDE))


def require_uniform(layout: Layout, what: str) -> None:
    """Raises ValueError if tensors of the layout have learning rates of their own."""
    require(layout.uniform, f"{what} has one learning rate for all tensors: give no parameter groups with others")


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`. For the rules' hyper-parameters."""
    if not condition:
        raise ValueError(message)


def require_by_element(rule: UpdateRule) -> None:
    """Raises ValueError if a rule can't run on several servers that each hold a range of θ."""
    require(
        rule.by_element,
        f"rule {rule.name or type(rule).__name__} can't run on several servers with these options, as it does not treat each "
        "parameter by itself: use one server, without --range",
    )


def require_weighing(rule: UpdateRule, settings: Hyperparameters) -> None:
    """Raises ValueError if batches are to be as large as workers are fast, and the run can't count them by their shares."""
    if settings.smallest_share == 1:
        return
    what = f"smallest_share {settings.smallest_share:g} makes batches of different sizes"
    for name, one in (("local_steps", 1), ("batch_variation", 0)):
        value = getattr(settings, name)
        require(value == one, f"{what}, which can't be combined with {name} {value:g}: set one of them to {one}")
    require(
        rule.weighs,
        f"{what}, and rule {rule.name or type(rule).__name__} with these options does not count a commit by its batch's share: "
        "set it to 1, or use gem with sgd, adam, adamw or lion",
    )


def require_waiting(rule: UpdateRule, settings: Hyperparameters) -> None:
    """Raises ValueError if replies are to wait for others' commits, and the rule needs them at once."""
    require(
        not settings.reply_wait or (rule.replies_may_wait and not rule.replies_before),
        f"reply_wait {settings.reply_wait:g} lets replies wait, and rule {rule.name or type(rule).__name__} with these options "
        "must make them with their own commits: set it to 0",
    )


def require_momentum(momentum: float) -> None:
    """Raises ValueError unless μ is at least 0 and, as float32 too, below 1."""
    require(0 <= float(np.float32(momentum)) < 1, f"the momentum must be at least 0 and below 1, not {momentum}")


def require_rate(learning_rate: float) -> None:
    """Raises ValueError unless η is in [1e-30, 1000], which float32 can represent."""
    require(1e-30 <= learning_rate <= 1e3, f"the learning rate must lie in [1e-30, 1000], not {learning_rate}")
