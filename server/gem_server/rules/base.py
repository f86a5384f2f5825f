"""What every update rule is: a step from (θ, gradient, the worker's own buffers) to a new θ, and facts about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from gem_api.layout import Layout, Vector

Buffers = dict[str, Vector]


@dataclass(frozen=True)
class PiFacts:
    """What the scaling factor π did in one commit, over all parameters.

    Attributes:
        counts: int64, shape (bins,): histogram of π. The first bin holds π = 0 alone, the last π = π_max alone.
        edges: float32, shape (bins,): the bins' lower edges.
        median: Median of π.
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
        """float64, shape (bins,): a value that stands for each bin, at most 1/32 from any in it."""
        middles = np.append((self.edges[:-1] + self.edges[1:]) / 2, self.edges[-1]).astype(np.float64)
        middles[0] = 0
        return middles

    @property
    def mean(self) -> float:
        """Mean of π, exact to 1/32."""
        return float(self.counts @ self.middles / self.counts.sum())

    @property
    def zero_ratio(self) -> float:
        """Share of parameters with π = 0."""
        return float(self.counts[0] / self.counts.sum())

    @property
    def max_ratio(self) -> float:
        """Share of parameters with π = π_max."""
        return float(self.counts[-1] / self.counts.sum())


class UpdateRule(ABC):
    """How a commit moves the central variable. Stateless: what it remembers of a worker lies in that worker's buffers.

    Attributes:
        name: What the rule is called on the command line.
        buffers: Names of the float32 buffers of shape (P,) that it keeps for each worker; they start at zero.
        answer: Which of them is sent back to the worker: the θ that its next gradient is computed on.
        answers_before: Whether that is the θ before the worker's own commit (else after it).
    """

    name: ClassVar[str]
    buffers: tuple[str, ...] = ("snapshot",)
    answer: str = "snapshot"
    answers_before: bool = False

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """η."""

    def pull(self, theta: Vector, buffers: Buffers) -> None:
        """The worker reads θ: keep what it will compute its gradient on."""
        np.copyto(buffers["snapshot"], theta)

    @abstractmethod
    def apply(self, layout: Layout, theta: Vector, gradient: Vector, buffers: Buffers, staleness: int) -> PiFacts | None:
        """Applies one commit in place.

        Args:
            layout: Where the tensors lie.
            theta: The central variable θ, float32, shape (P,).
            gradient: float32, shape (P,), finite.
            buffers: The worker's buffers.
            staleness: τ, commits applied since the worker's pull (Eq. 2).

        Returns:
            Facts about π, or None for a rule without one.
        """

    def scale(self, staleness: int, pi: PiFacts | None) -> float:
        """The mean factor that a commit's Δ was multiplied by, from what `apply` was given and answered."""
        return 1.0 if pi is None else pi.mean


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`. For the rules' hyper-parameters."""
    if not condition:
        raise ValueError(message)


def require_rate(learning_rate: float) -> None:
    """Raises ValueError unless η is one that float32 can express: 1e-30 to 1000."""
    require(1e-30 <= learning_rate <= 1e3, f"the learning rate must lie in [1e-30, 1000], not at {learning_rate}")
