"""Gradient Energy Matching (Hermans & Louppe 2018, arXiv 1805.08469)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from gem_api.hyperparameters import SNAPSHOTS
from gem_api.layout import Layout, Vector

from gem_server.rules.base import NO_ANSWER, Buffers, PiFacts, UpdateRule, require, require_rate
from gem_server.rules.bins import bin_edges
from gem_server.rules.fused import BINS, gem_part, join_parts


@dataclass(frozen=True)
class Gem(UpdateRule):
    """Rescales each commit so that all workers together move θ with the energy of sequential momentum SGD.

        Δ = −η·g
        m ← μ·m + Δ                                             (Eq. 24)
        π = clip((κ|m| − |θ_t − s|) / (|Δ| + ε), 0, π_max)      (Eqs. 19, 27; the clip is the authors' code)
        θ_{t+1} = θ_t + π·Δ

    The snapshot s, by convention:
        after      s = θ_{t+1}, where the worker's next gradient is computed (Eq. 16 as written)
        paper      s = θ_t, and the next gradient is computed there (Algorithm 1)
        reference  s = θ_t, but the next gradient is computed at θ_{t+1}; the first s is zero, and |Δ + ε| divides
                   (the authors' code, which has ε = 1e-12)
    """

    learning_rate: float = 0.05
    momentum: float = 0.9
    kappa: float = 1.0
    epsilon: float = 1e-16
    pi_max: float = 5.0
    snapshot: str = "after"
    name: ClassVar[str] = "gem"

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require(0 <= float(np.float32(self.momentum)) < 1, f"the momentum must be at least 0 and below 1, not {self.momentum}")
        require(0 < self.kappa <= 1e3, f"kappa must be above 0 and at most 1000, not {self.kappa}")
        require(1e-30 <= self.epsilon <= 1, f"epsilon must lie in [1e-30, 1], not {self.epsilon}")
        require(1e-3 <= self.pi_max <= 1e6, f"pi-max must lie in [0.001, 1e6], not {self.pi_max}")
        require(self.snapshot in SNAPSHOTS, f"the snapshot convention is one of {', '.join(SNAPSHOTS)}, not {self.snapshot!r}")

    @property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("moment", "snapshot", "answer") if self._by_reference else ("moment", "snapshot")

    @property
    def answer(self) -> str:  # type: ignore[override]
        return "answer" if self._by_reference else "snapshot"

    @property
    def answers_before(self) -> bool:  # type: ignore[override]
        return self.snapshot == "paper"

    @property
    def _by_reference(self) -> bool:
        return self.snapshot == "reference"

    @cached_property
    def _edges(self) -> npt.NDArray[np.float32]:
        return bin_edges(self.pi_max)

    @cached_property
    def _settings(self) -> npt.NDArray[np.float32]:
        """What `gem_part` is told."""
        epsilons = (self.epsilon, 0.0) if self._by_reference else (0.0, self.epsilon)
        settings = (self.learning_rate, self.momentum, self.kappa, *epsilons, self.pi_max, self.largest)
        return np.array(settings, np.float32)

    def pull(self, theta: Vector, buffers: Buffers) -> None:
        # By reference a pull leaves s alone: it starts at zero and changes only with the worker's own commits.
        super().pull(theta, {"answer": buffers["answer"]} if self._by_reference else buffers)

    def apply(self, layout: Layout, theta: Vector, gradient: Vector, buffers: Buffers, staleness: int) -> PiFacts:
        parts = self.threads.parts(theta.size)
        offsets, edges = layout.offsets, self._edges
        counts = np.empty((parts, 3, BINS), np.int64)
        shared = np.empty((parts, 2), np.int64)
        medians = np.zeros(offsets.size - 1, np.float32)
        energies = np.empty((parts, 2))
        arguments = (
            parts, theta, gradient, buffers["moment"], buffers["snapshot"], buffers.get("answer", NO_ANSWER), offsets, edges,
            self._settings, self.snapshot == "after", self.snapshot != "paper", counts, shared, medians, energies,
        )  # fmt: skip
        self.threads.run(lambda part: gem_part(part, *arguments), parts)
        median, proxy_energy, central_energy = join_parts(offsets, edges, counts, shared, medians, energies)
        return PiFacts(counts[0, 0], edges, float(median), medians, proxy_energy, central_energy)
