"""Gradient Energy Matching in ordinary array operations, as a careful user of NumPy or PyTorch would write it for a peer."""

from __future__ import annotations

from typing import Any

from gem_api.hyperparameters import Hyperparameters

SETTINGS = Hyperparameters()
ETA = SETTINGS.learning_rate


def rescaled(library: Any, theta: Any, gradient: Any, moment: Any, snapshot: Any) -> Any:
    """The update π·Δ of one gradient; `moment` is changed in place. Makes three temporaries, no more than it needs.

    Δ = −η·g
    m ← μ·m + Δ                                             (Eq. 24)
    π = clip((κ|m| − |θ − s|) / (|Δ| + ε), 0, π_max)        (Eqs. 19, 27)

    Args:
        library: The module numpy or torch, whose functions have the same names.
        theta, gradient, moment, snapshot: Its arrays: float32, shape (P,).
    """
    delta = gradient * -ETA
    moment *= SETTINGS.momentum
    moment += delta
    pi = library.abs(moment)
    pi *= SETTINGS.kappa
    scratch = theta - snapshot
    pi -= library.abs(scratch, out=scratch)
    library.abs(delta, out=scratch)
    scratch += SETTINGS.epsilon
    pi /= scratch
    library.clip(pi, 0, SETTINGS.pi_max, out=pi)
    delta *= pi
    return delta
