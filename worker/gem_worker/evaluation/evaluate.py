"""Computes loss and accuracy of θ on held-out data, and reports them to the server."""

from __future__ import annotations

from typing import Any

import torch
from gem_api.errors import LayoutMismatch
from gem_api.layout import NAME_TENSORS, Layout, Vector
from gem_client import Admin, Retry, Session, connect
from gem_client.torch.parameters import plain_name
from torch.utils.data import DataLoader

from gem_worker.device import CPU, moved, use
from gem_worker.evaluation import Score
from gem_worker.tasks import Task, TaskError

_BATCH = 500


class Evaluator:
    """A model and the test set; evaluates the θ that it is given.

    Buffers such as BatchNorm's statistics are not part of θ, so they keep their initial values.

    Args:
        task: The model and the held-out data.
        device: Where to compute.
    """

    def __init__(self, task: Task, device: torch.device = CPU) -> None:
        self._task = task
        self._device = device
        self._model = task.model().eval().to(device)
        self._parameters = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        self._loader = DataLoader(task.test_data(), batch_size=_BATCH, pin_memory=device.type == "cuda")

    @torch.no_grad()
    def score(self, version: int, layout: Layout, theta: Vector) -> Score:
        """Evaluates θ (float32, shape (P,)). Raises LayoutMismatch if the run trains a different model."""
        use(self._device)
        tensors = layout.split(theta)
        expected = {name: tuple(parameter.shape) for name, parameter in self._parameters.items() if name in tensors}
        if expected != {name: value.shape for name, value in tensors.items()}:
            if all(tensor.nameless for tensor in layout.tensors):
                raise LayoutMismatch(f"the run's tensors have positions, not names. {NAME_TENSORS}")
            raise LayoutMismatch("the run trains a different model than this task's: use the same --task as the workers")
        for name, value in tensors.items():
            self._parameters[name].copy_(torch.from_numpy(value))
        samples, loss, correct = 0, 0.0, 0
        for read in self._loader:
            size, batch_loss, right = self._score_batch(read)
            samples += size
            loss += size * batch_loss
            correct = -1 if right is None or correct < 0 else correct + right
        return Score(version, loss / samples, None if correct < 0 else correct / samples)

    @torch.no_grad()
    def try_out(self) -> None:
        """Evaluates the model as it is on the first batch, so that a mistake in the task is known before a run depends on it.

        Raises TaskError if there is no held-out data or `correct` counts nothing, and whatever the task raises."""
        use(self._device)
        first = next(iter(self._loader), None)
        if first is None:
            raise TaskError("the task's test_data() is empty, so that nothing can be evaluated: return at least one sample")
        self._score_batch(first)

    def _score_batch(self, read: Any) -> tuple[int, float, int | None]:
        """Number of samples in a batch, the loss, and how many are classified correctly; None if the task does not say."""
        batch, size = moved(read, self._device), len(read[0])
        loss, right = float(self._task.loss(self._model, batch)), self._task.correct(self._model, batch)
        if right is None:
            return size, loss, None
        if not (float(right).is_integer() and 0 <= right <= size):
            raise TaskError(
                f"the task's correct(model, batch) must return how many samples are right, a whole number from 0 to {size} for "
                f"this batch, or None; not {right!r}"
            )
        return size, loss, int(right)


class RemoteEvaluator:
    """Evaluates the newest θ of a server, and reports the score to it.

    Args:
        address: The server's address.
        task: The model and the held-out data.
        retry: How long to keep retrying an unreachable server.
        device: Where to compute.
        credentials: `token`, `tls_ca`, `tls_cert` and `tls_key` as for `Admin`.

    Raises:
        TaskError: There is no held-out data. Whatever the task raises comes through, also on a first batch.

    Attributes:
        reader: The session that pulls θ; it does not join the run.
        admin: For all other requests to the server.
    """

    def __init__(self, address: str, task: Task, retry: Retry, device: torch.device = CPU, **credentials: Any) -> None:
        self._evaluator = Evaluator(task, device)
        self._evaluator.try_out()
        self._retry = retry
        self.reader: Session = connect(address, retry=retry, **credentials)
        self.admin = Admin(address, **credentials)

    def evaluate(self) -> Score:
        """Raises a GemError if the server is unreachable, has no θ yet, or trains a different model."""
        theta = self.reader.pull()
        score = self._evaluator.score(self.reader.version, self.reader.layout, theta)
        self._retry.call(lambda: self.admin.report_evaluation(score.version, score.loss, score.accuracy))
        return score

    def close(self) -> None:
        self.reader.close()
        self.admin.close()
