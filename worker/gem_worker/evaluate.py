"""Loss and accuracy of the central variable on held-out data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gem_api.layout import Layout, Vector
from torch.utils.data import DataLoader

from gem_worker.tasks import Task

_BATCH = 500


@dataclass(frozen=True)
class Score:
    """Mean loss, and share of correct answers (0 to 1; None where the task has none), of one version."""

    version: int
    loss: float
    accuracy: float | None


class Evaluator:
    """Keeps a model and the test set; scores whatever θ it is given.

    Buffers such as BatchNorm's statistics are not part of θ: they keep their first values here.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._model = task.model().eval()
        self._parameters = dict(self._model.named_parameters())
        self._loader = DataLoader(task.test_data(), batch_size=_BATCH)

    @torch.no_grad()
    def score(self, version: int, layout: Layout, theta: Vector) -> Score:
        """Scores θ (float32, shape (P,))."""
        for name, value in layout.split(theta).items():
            parameter = self._parameters[name]
            parameter.copy_(torch.from_numpy(value).view_as(parameter))
        samples, loss, correct = 0, 0.0, 0
        for batch in self._loader:
            size = len(batch[0])
            samples += size
            loss += size * float(self._task.loss(self._model, batch))
            right = self._task.correct(self._model, batch)
            correct = -1 if right is None or correct < 0 else correct + right
        return Score(version, loss / samples, None if correct < 0 else correct / samples)
