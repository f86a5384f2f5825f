"""Evaluates the model on held-out data: for `gem-evaluator` and `gem-train`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy (0 to 1; None if the task defines none) of one version of θ."""

    version: int
    loss: float
    accuracy: float | None
