"""BatchNorm's statistics of a model whose parameters came from the server, which holds none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gem_api.errors import InvalidRequest
from torch import nn
from torch.optim.swa_utils import update_bn


def update_statistics(model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], object] | None = None) -> None:
    """Sets the running statistics of a model's BatchNorm to their mean over `batches`. Call it after
    `Optimizer.load_final`, or whenever other parameters were loaded, and before the model is evaluated or saved.

    It does what PyTorch's `update_bn` does, for any kind of batch. A model without BatchNorm stays as it is.

    Args:
        model: The model. It is in the same mode, training or not, afterwards.
        batches: Batches of the training set, such as a DataLoader's. Some thousand samples are enough.
        forward: Runs the model on a batch, as in `lambda batch: model(batch["image"], batch["mask"])`, and moves it to the
            model's device. Without it, the model gets the batch, or its first item if it is a list or a tuple.

    Raises:
        InvalidRequest: A batch is a dictionary, and there is no `forward`.
    """
    runner = _Runner(model, forward)
    runner.training = model.training  # the mode that `update_bn` comes back to
    update_bn(([batch] for batch in batches), runner)


class _Runner(nn.Module):
    """A model as a function of a batch."""

    def __init__(self, model: nn.Module, forward: Callable[[Any], object] | None) -> None:
        super().__init__()
        self._model, self._forward = model, forward

    def forward(self, batch: Any) -> object:
        if self._forward is not None:
            return self._forward(batch)
        if isinstance(batch, Mapping):
            raise InvalidRequest("a batch is a dictionary: say how the model takes it, as forward=lambda batch: model(...)")
        first = batch[0] if isinstance(batch, list | tuple) else batch
        return self._model(first.to(next(self._model.parameters()).device))
