"""An average of a model over the commits of all workers: the teacher of BYOL, DINO or MoCo, or weights to evaluate."""

from __future__ import annotations

import torch
from gem_api.errors import InvalidRequest
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gem_client.torch.optimizer import Optimizer


class CommitAverage(AveragedModel):
    """PyTorch's `AveragedModel`, as an exponential moving average over the commits of all workers.

    `update_parameters(model)`, called after each step, keeps decay^k of the average; k is the number of commits since the last
    call, of whichever worker. So the average follows the run, as with one worker, and not this worker's own steps, which are
    fewer the more workers there are. It begins at θ, which the optimizer has loaded: also that of a worker that joins late. If
    the run keeps an average itself (`gem-server --average`), it begins at that.

        teacher = CommitAverage(student, optimizer, 0.99)
        ...
        optimizer.step()
        teacher.update_parameters(student)

    Args:
        model: The model, or a part of it. The average is a copy.
        optimizer: The optimizer that trains it.
        decay: What each commit leaves of the average, 0 to 1.
        use_buffers: Whether buffers are averaged too; otherwise they are copied.

    Raises:
        InvalidRequest: `decay` is another number.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float, *, use_buffers: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise InvalidRequest(f"decay is a number from 0 to 1, not {decay!r}")
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers)
        self.n_averaged.fill_(1)  # at 0, the first update would copy the model
        self._session, self._decay = optimizer.session, decay
        self._version = self._session.base.version
        if self._session.hyperparameters.average:
            self._begin_at_runs(model, optimizer)

    def update_parameters(self, model: nn.Module) -> None:
        """Follows the model, whose parameters the optimizer has just loaded."""
        version = self._session.base.version
        passed, self._version = max(0, version - self._version), version  # a server may come back with an older θ
        self.multi_avg_fn = get_ema_multi_avg_fn(self._decay**passed)
        super().update_parameters(model)

    @torch.no_grad()
    def _begin_at_runs(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Loads the average that the server keeps."""
        tensors = self._session.layout.split(self._session.read(average=True))
        names = {id(parameter): name for name, parameter in optimizer.trained.items()}
        for own, trained in zip(self.module.parameters(), model.parameters(), strict=True):
            if id(trained) in names:
                own.copy_(torch.from_numpy(tensors[names[id(trained)]]))
