"""When Gradient Energy Matching is stable: a linear model of many workers.

Every worker computes for a time D, drawn anew for each gradient with mean 1 (a *round*). Near an optimum along one direction of
curvature h, the gradient is h·x. Averaged over very many workers, with E over D:

    moment     M(t) = μ·E M(t − D) − η·h·E x(t − D)       each worker's last commit was D ago, and its gradient is as old
    matching   x(t) − E x(t − D) = c·M(t)                 Eq. 27: what all have moved since equals the proxy

c is κ, times how much larger the moments that decide are than their mean. For x ~ exp(λt) and φ = E exp(−λD):

    (1 − φ)(1 − μφ) + k·φ = 0,   k = c·η·h

The run is stable as long as every root λ has a negative real part. If all take the same time, φ = exp(−λ) gives k < 2(1 + μ),
as for momentum SGD on one machine. If times are distributed exponentially, φ = 1/(1 + λ) gives λ² + (1 − μ + k)λ + k = 0, whose
roots have negative real parts for every k > 0: then no learning rate is too large, in this model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Complexes = npt.NDArray[np.complex128]
Transform = Callable[[Complexes], Complexes]  # φ(λ) = E exp(−λD)

_FASTEST = 60.0  # oscillations are looked for up to this angular frequency, in radians a round
_POINTS = 600_001


def gamma_times(spread: float) -> Transform:
    """φ of compute times with a gamma distribution of mean 1 and standard deviation `spread`, greater than 0."""
    return lambda rate: np.asarray((1 + rate * spread**2) ** (-1 / spread**2))


def uniform_times(spread: float) -> Transform:
    """φ of compute times that are uniform between 1 − spread and 1 + spread, as with batches of varied size."""
    return lambda rate: np.asarray((np.exp(-rate * (1 - spread)) - np.exp(-rate * (1 + spread))) / (2 * spread * rate))


def stable_below(times: Transform, momentum: float) -> float:
    """The least k = c·η·h at which the run begins to oscillate; infinity if it never does.

    At the border a root is λ = iω, so −(1 − φ)(1 − μφ)/φ = k is real and positive there.
    """
    frequencies = np.linspace(1e-3, _FASTEST, _POINTS)
    phi = times(1j * frequencies.astype(np.complex128))
    border = -(1 - phi) * (1 - momentum * phi) / phi
    crossings = np.flatnonzero(np.diff(np.sign(border.imag)))
    found = border.real[crossings]
    return float(found[found > 1e-3].min(initial=np.inf))
