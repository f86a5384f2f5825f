"""Notices changes to a model that `Optimizer` would lose: to parameters between two steps, and to which of them are trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from gem_api.errors import InvalidRequest
from torch import Tensor

log = logging.getLogger("gem_client")
CERTAIN_STEPS = 3  # at first all values are compared: a change through `.data` leaves no trace


class Watch:
    """The state of a model when θ was loaded into it: of its parameters in the run, and of those that are not trained."""

    def __init__(
        self, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor], inner: torch.optim.Optimizer | None
    ) -> None:
        self._trained, self._frozen, self._inner = trained, frozen, inner
        self._sizes = self._group_sizes()
        self._versions: list[int] = []
        self._steps = 0
        self._warned_of_change = self._warned_of_missing = False

    def loaded(self) -> None:
        """The parameters hold what they should."""
        self._versions = [parameter._version for parameter in self._trained.values()]

    def require_same_parameters(self) -> None:
        """Raises InvalidRequest if parameters that are not in the run are about to be trained."""
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise InvalidRequest(
                    f"parameter {name!r} has a gradient, but was frozen when the Optimizer was made, so it is not in the run. "
                    f"{_FREEZE_LATER}"
                )
        if self._group_sizes() != self._sizes:
            raise InvalidRequest(f"parameters were added to the optimizer, but the run's tensors are fixed. {_FREEZE_LATER}")

    def require_unchanged(self, thetas: Sequence[Tensor] | None, all_values: bool, exact: bool) -> None:
        """Raises InvalidRequest if parameters no longer hold `thetas`, what was loaded into them. If these are not known any
        more, a changed parameter is logged. `all_values`: also compares parameters that show no sign of a change. `exact`:
        a difference as small as rounding counts, too."""
        self._steps += 1
        all_values |= self._steps <= CERTAIN_STEPS
        known = thetas if thetas is not None else [None] * len(self._versions)
        for (name, parameter), version, theta in zip(self._trained.items(), self._versions, known, strict=True):
            changed = parameter._version != version
            if theta is not None and parameter.data_ptr() != theta.data_ptr():
                if (changed or all_values) and not _holds(parameter, theta, exact):
                    raise InvalidRequest(f"parameter {name!r} was changed since {_LAST}, and no commit has it. {_ADVICE}")
            elif changed and not self._warned_of_change:
                self._warned_of_change = True
                log.warning(
                    "parameter %r was changed since %s: if its values were not put back, the next θ replaces them. %s",
                    name, _LAST, _ADVICE,
                )  # fmt: skip

    def warn_of_missing(self, optimizer: str) -> None:
        """Says once that an optimizer on the server moves parameters without a gradient, unlike in PyTorch."""
        if self._warned_of_missing or optimizer == "sgd":
            return
        missing = [name for name, parameter in self._trained.items() if parameter.grad is None]
        if missing:
            self._warned_of_missing = True
            log.warning(
                "%d parameters have no gradient, such as %s: the server's %s takes it as zero, so weight decay and earlier "
                "gradients still move them. To keep parameters as they are, freeze them before you make the Optimizer, or use "
                'on="worker"',
                len(missing), missing[0], optimizer,
            )  # fmt: skip

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._inner.param_groups] if self._inner is not None else []


_FREEZE_LATER = (
    "Make the Optimizer while every parameter that will ever be trained requires gradients; after that, freeze those that have "
    "to wait (requires_grad_(False))"
)
_LAST = "the last step, or since the Optimizer was made"
_ADVICE = (
    "The run has one θ for all workers: make each step with the Optimizer's own step() (for SAM step(closure)), not with that "
    "of the optimizer inside it; load weights before you make the Optimizer (the first worker's count) or after load_final(); "
    "and give it a projection, such as a clamp or the max_norm= of an Embedding, as project="
)


def _holds(parameter: Tensor, theta: Tensor, exact: bool) -> bool:
    """Whether a parameter holds θ, in its own dtype, or rounded by a conversion to a shorter one and back. Unless `exact`, it
    may differ by rounding, as values do that were perturbed by adding a tensor and put back by subtracting it (SAM, MeZO)."""
    ours, theirs = parameter.detach(), theta.view_as(parameter).to(parameter.device)
    if any(torch.equal(ours, theirs.to(short).to(ours.dtype)) for short in (ours.dtype, torch.bfloat16, torch.float16)):
        return True
    if exact:
        return False
    rounding = max(2e-6, 4 * torch.finfo(ours.dtype).eps)
    # 1e-7: values near zero are rounded as those of the perturbation, up to 1.
    return bool((ours - theirs).abs().max() <= rounding * theirs.abs().max() + 1e-7)
