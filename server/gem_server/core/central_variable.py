"""The central variable θ: its layout, its version, and which worker gives it its first value."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gem_api.errors import NonFiniteGradient, NotInitialized
from gem_api.framing import empty
from gem_api.layout import Layout, Vector

from gem_server.rules.fused import all_within


class CentralVariable:
    """θ, one packed float32 buffer, with the number of commits applied to it.

    Attributes:
        layout: Its tensors; None until the first worker has registered.
        theta: float32, shape (P,); meaningless until `initialized`.
        version: Commits applied so far.
        progress: The same, each counted by its weight: by its share of a whole batch.
        initialized: Whether θ has its first value.
        initializer: Lease id of the worker that was asked for the first value.
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.theta: Vector = empty(0)
        self.version = 0
        self.progress = 0.0
        self.initialized = False
        self.initializer: str | None = None
        self._copies: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()

    def require_fitting(self, layout: Layout) -> None:
        """Raises LayoutMismatch if the run has another layout."""
        if self.layout is not None:
            self.layout.require_same(layout)

    def adopt(self, layout: Layout, theta: Vector) -> None:
        """Sets layout and memory for θ (float32, shape (P,)) when the first worker registers; later workers change nothing."""
        if self.layout is None:
            self.layout, self.theta = layout, theta

    def forget_layout(self) -> None:
        """Forgets the layout. Call this if all workers have left before θ had a value."""
        self.layout, self.theta, self.initializer = None, empty(0), None

    def start(self) -> None:
        """Marks θ as initialised: its first value is complete."""
        self.initialized, self.initializer = True, None

    def require_initialized(self) -> None:
        if not self.initialized:
            raise NotInitialized("the model has no parameters yet: wait until a worker has initialised them")

    @property
    def size(self) -> int:
        return self.layout.size if self.layout else 0

    def copy(self) -> Copy:
        """A copy of the current θ, shared by all readers of this version. Call it between two commits."""
        found = self._copies.get(self.version)
        if found is None:
            found = self._copies[self.version] = Copy(self.version, self.progress, self.theta.copy())
        return found

    @property
    def has_copy(self) -> bool:
        """Whether the current version has been copied for a reader already."""
        return self.version in self._copies

    @property
    def copies(self) -> int:
        """Copies still being read."""
        return len(self._copies)


@dataclass(frozen=True, eq=False)
class Copy:
    """θ at one version, freed when the last reader is done."""

    version: int
    progress: float
    theta: Vector


Check = Callable[[Vector], None]  # looks at a part of a tensor that arrives; raises NonFiniteGradient


def require_finite(values: Vector, limit: np.float32, what: str) -> None:
    """Raises NonFiniteGradient if any v of `values` (float32, shape (n,)) is NaN or |v| > limit."""
    if not all_within(values, limit):
        raise NonFiniteGradient(
            f"the {what} holds NaN, infinity or a value beyond ±{limit:.3g}; the model is unchanged: training may have "
            "diverged (lower the learning rate), or the batch holds bad data"
        )
