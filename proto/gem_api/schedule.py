"""The schedule of the learning rate: a pure function of the version, used by the server and by workers' local steps."""

from __future__ import annotations

import math

from gem_api.hyperparameters import Hyperparameters


def factor(hyperparameters: Hyperparameters, version: int) -> float:
    """The factor of η at version t, in [0, 1]: η_t = η · warm-up · decay.

    With w = warmup_versions, T = decay_versions, γ = decay_factor and u = max(0, t − w):
        warm-up     (t + 1) / w if t < w, else 1
        constant    1
        step        γ^⌊u/T⌋
        cosine      γ + (1 − γ)·½·(1 + cos(π·min(1, u/T)))      (Loshchilov & Hutter 2016, arXiv 1608.03983, Eq. 5, one period)
    """
    if version < hyperparameters.warmup_versions:
        return (version + 1) / hyperparameters.warmup_versions
    passed, span, last = version - hyperparameters.warmup_versions, hyperparameters.decay_versions, hyperparameters.decay_factor
    if hyperparameters.schedule == "step":
        return float(last ** (passed // span))
    if hyperparameters.schedule == "cosine":
        return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, passed / span)))
    return 1.0


def rate(hyperparameters: Hyperparameters, version: int) -> float:
    """η_t, the learning rate at a version."""
    return hyperparameters.learning_rate * factor(hyperparameters, version)


def server_rate(hyperparameters: Hyperparameters, version: int) -> float | None:
    """η_t at a version; None if the workers' own optimizers have the run's rates, so that the server applies none."""
    return None if hyperparameters.optimizer == "worker" else rate(hyperparameters, version)


def require_schedule(hyperparameters: Hyperparameters) -> None:
    """Raises ValueError for a schedule without its length."""
    if hyperparameters.schedule != "constant" and not hyperparameters.decay_versions:
        raise ValueError(f"--schedule {hyperparameters.schedule} needs --decay-versions, the number of commits that it takes")
