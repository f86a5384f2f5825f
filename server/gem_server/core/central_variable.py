"""The central variable θ: its layout, its version, and which worker gives it its first value."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gem_api.errors import InvalidRequest, NonFiniteGradient, NotInitialized
from gem_api.framing import empty
from gem_api.hyperparameters import NO_AVERAGE
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
        decay: β of the average; 0: none is kept.
        average: The exponential moving average of θ over its versions, float32, shape (P,): see `rules/average.py`. None if
            none is kept, or before θ has a value.
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.theta: Vector = empty(0)
        self.version = 0
        self.progress = 0.0
        self.initialized = False
        self.initializer: str | None = None
        self.decay = 0.0
        self.average: Vector | None = None
        self._copies: weakref.WeakValueDictionary[tuple[int, bool], Copy] = weakref.WeakValueDictionary()

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

    def keep_average(self, decay: float) -> None:
        """Keeps an average with this β from now on; 0: none. One that is kept already goes on; else it begins at θ."""
        self.decay = decay
        if not decay:
            self.average = None
        elif self.initialized:
            self.begin_average()

    def begin_average(self) -> None:
        """Begins the average at θ, if one is to be kept and there is none yet."""
        if self.decay and self.average is None:
            self.average = self.theta.copy()

    def require_average(self) -> Vector:
        """The average. Raises NotInitialized before θ has a value, and InvalidRequest if none is kept."""
        self.require_initialized()
        if self.average is None:
            raise InvalidRequest(NO_AVERAGE)
        return self.average

    def require_initialized(self) -> None:
        if not self.initialized:
            raise NotInitialized("the model has no parameters yet: wait until a worker has initialised them")

    @property
    def size(self) -> int:
        return self.layout.size if self.layout else 0

    def copy(self, average: bool = False) -> Copy:
        """A copy of the current θ, or of its average, shared by all readers at this version. Call it between two commits."""
        found = self._copies.get((self.version, average))
        if found is None:
            values = self.require_average() if average else self.theta
            found = self._copies[self.version, average] = Copy(self.version, self.progress, values.copy())
        return found

    def has_copy(self, average: bool) -> bool:
        """Whether the current θ, or its average, has been copied for a reader already."""
        return (self.version, average) in self._copies

    @property
    def copies(self) -> int:
        """Copies still being read."""
        return len(self._copies)


@dataclass(frozen=True, eq=False)
class Copy:
    """θ or its average at one version, freed when the last reader is done."""

    version: int
    progress: float
    theta: Vector


Check = Callable[[Vector], None]  # looks at a part of a tensor that arrives; raises NonFiniteGradient


def require_finite(values: Vector, limit: np.float32, what: str) -> None:
    """Raises NonFiniteGradient if any v of `values` (float32, shape (n,)) is NaN or |v| > limit."""
    if not all_within(values, limit):
        raise NonFiniteGradient(
            f"the {what} holds NaN, infinity or a value beyond ±{limit:.3g}; the model is unchanged: training may have "
            "diverged (lower the learning rate), or the batch holds bad data (leave it out: skip() instead of step())"
        )
