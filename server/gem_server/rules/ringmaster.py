"""Ringmaster ASGD (Maranjyan, Tyurin & Richtárik 2025, arXiv 2501.16168)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gem_api.update_kind import UpdateKind

from gem_server.rules.base import RuleInput, require
from gem_server.rules.plain import Downpour


@dataclass(frozen=True)
class Ringmaster(Downpour):
    """Plain asynchronous SGD that discards gradients that are too stale.

    θ_{t+1} = θ_t − η·g      if τ < R                       (Algorithm 4)
    Otherwise the gradient is discarded: t stays as it is, and the worker continues from θ_t.
    """

    threshold: int = 16
    name: ClassVar[str] = "ringmaster"
    by_element = False  # ranges would discard different commits

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.threshold >= 1, f"threshold (R) must be at least 1, not {self.threshold}")

    @property
    def kind(self) -> UpdateKind:  # type: ignore[override]
        return "gradient"

    def accepts(self, rule_input: RuleInput) -> bool:
        return rule_input.staleness < self.threshold
