"""Computes loss and accuracy of θ on held-out data, and reports them to the server; `follow` is the body of gem-evaluator."""

from __future__ import annotations

import time
from typing import Any

import torch
from gem_api.errors import InvalidRequest, LayoutMismatch
from gem_api.framing import empty
from gem_api.layout import NAME_TENSORS, Layout, Vector
from gem_api.process import logs
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError, NotInitialized, Retry, Session, connect
from gem_client.retry import FailureLog
from gem_client.torch import update_statistics
from gem_client.torch.parameters import plain_name
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from gem_worker.command import EXIT_FAILED, EXIT_WRONG_USE
from gem_worker.device import CPU, devices, moved, pins, use
from gem_worker.evaluation import Score
from gem_worker.tasks import Task, TaskError, load_task

_BATCH = 500
_NORMALISED_ON = 10_000  # samples of the training data for BatchNorm's statistics, at most


class Evaluator:
    """A model and the test set; evaluates the θ that it is given.

    Buffers are not part of θ. BatchNorm's statistics are computed for each θ, from training data. Other buffers keep their
    initial values.

    Args:
        task: The model and the held-out data.
        device: Where to compute.
    """

    def __init__(self, task: Task, device: torch.device = CPU) -> None:
        self._task = task
        self._device = device
        self._model = task.model().eval().to(device)
        self._parameters = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        self._loader = DataLoader(task.test_data(), batch_size=_BATCH, pin_memory=pins(device))
        normalises = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in self._model.modules())
        self._normalised_on = _some_of(task.training_data()) if normalises else None

    @torch.no_grad()
    def score(self, version: int, layout: Layout, theta: Vector) -> Score:
        """Evaluates θ (float32, shape (P,)). Raises LayoutMismatch if the run trains a different model."""
        use(self._device)
        whole: Any = torch.from_numpy(theta).to(self._device)  # one copy; it is split as an array is
        tensors = layout.split(whole)
        expected = {name: tuple(parameter.shape) for name, parameter in self._parameters.items() if name in tensors}
        if expected != {name: tuple(value.shape) for name, value in tensors.items()}:
            if all(tensor.nameless for tensor in layout.tensors):
                raise LayoutMismatch(f"the run's tensors have positions, not names. {NAME_TENSORS}")
            raise LayoutMismatch("the run trains a different model than this task's: use the same --task as the workers")
        for name, value in tensors.items():
            self._parameters[name].copy_(torch.as_tensor(value))
        if self._normalised_on is not None:
            batches = (moved(batch, self._device) for batch in self._normalised_on)
            update_statistics(self._model, batches, lambda batch: self._task.loss(self._model, batch))
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
        loss, right = _read_together(self._task.loss(self._model, batch), self._task.correct(self._model, batch))
        if right is None:
            return size, loss, None
        if not (float(right).is_integer() and 0 <= right <= size):
            raise TaskError(
                f"the task's correct(model, batch) must return how many samples are right, a whole number from 0 to {size} for "
                f"this batch, or None; not {right!r}"
            )
        return size, loss, int(right)


def _read_together(loss: Any, right: Any) -> tuple[float, Any]:
    """A batch's loss, and how many are right. Waits once for the device if both are there."""
    if not (isinstance(loss, Tensor) and isinstance(right, Tensor)):
        return float(loss), right
    dtype = torch.promote_types(loss.dtype, torch.float32)  # which holds every count of a batch
    first, second = torch.stack([loss.reshape(()).to(dtype), right.reshape(()).to(loss.device, dtype)]).cpu().tolist()
    return first, second


def _some_of(data: Any) -> DataLoader[Any]:
    """Batches of the training data for BatchNorm's statistics: drawn at random, the same each time."""
    drawn = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:_NORMALISED_ON].tolist()
    return DataLoader(Subset(data, drawn), _BATCH, drop_last=len(drawn) > _BATCH)  # a batch of one has no variance


class RemoteEvaluator:
    """Evaluates the newest model of a server, and reports the score to it: the average of θ if the run keeps one, else θ.

    Args:
        address: The server's address.
        task: The model and the held-out data.
        retry: How long to keep retrying an unreachable server.
        device: Where to compute.
        credentials: `token`, `tls_ca`, `tls_cert` and `tls_key` as for `Admin`.

    Raises:
        TaskError: There is no held-out data. Whatever the task raises comes through, also on a first batch.

    Attributes:
        reader: The session that reads the model; it does not join the run.
        admin: For all other requests to the server.
        theta: The model read last: float32, shape (P,); empty before.
        version: Its version.
    """

    def __init__(self, address: str, task: Task, retry: Retry, device: torch.device = CPU, **credentials: Any) -> None:
        self._evaluator = Evaluator(task, device)
        self._evaluator.try_out()
        self._retry = retry
        self.reader: Session = connect(address, retry=retry, **credentials)
        self.admin = Admin(address, **credentials)
        self.theta, self.version = empty(0), 0

    def read(self) -> None:
        """Reads the newest model. Raises a GemError if the server is unreachable, or has no θ yet."""
        if self._retry.call(self.admin.status).hyperparameters.average:
            self.theta, self.version = self.reader.read(average=True), self.reader.read_version
        else:
            self.theta, self.version = self.reader.pull(), self.reader.version

    def evaluate(self) -> Score:
        """Raises a GemError if the server is unreachable, has no θ yet, or trains a different model."""
        self.read()
        score = self._evaluator.score(self.version, self.reader.layout, self.theta)
        self._retry.call(lambda: self.admin.report_evaluation(score.version, score.loss, score.accuracy))
        return score

    def close(self) -> None:
        self.reader.close()
        self.admin.close()


def follow(options: dict[str, Any], security: dict[str, Any], log: logs.Logger) -> int:
    """Evaluates until the process is stopped, or once with --once; returns the exit status.

    Args:
        options: The options of gem-evaluator.
        security: `token`, `tls_ca`, `tls_cert` and `tls_key` as for `connect`.
        log: Receives what happens.
    """
    torch.set_num_threads(options["threads"])
    retry = Retry(give_up_after=options["give_up_after"])
    try:
        (device,) = devices(options["device"])
        task = load_task(options["task"], options["data"])
        evaluator = RemoteEvaluator(options["server"], task, retry, device, **security)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        return EXIT_WRONG_USE
    except InvalidRequest as error:
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE
    failures = FailureLog("the run's status")
    try:
        while True:
            status = retry.call(evaluator.admin.status, failures.failed, failures.recovered)
            done = _evaluate_if_new(evaluator, status, log)
            if options["once"] and done:
                return 0
            time.sleep(options["evaluate_every"])
    except (GemError, TaskError) as error:
        log.error("the evaluation failed", error=type(error).__name__, why=str(error))
        return EXIT_FAILED
    finally:
        evaluator.close()


def _evaluate_if_new(evaluator: RemoteEvaluator, status: pb.GetStatusResponse, log: logs.Logger) -> bool:
    """Evaluates θ if the server has no evaluation of its version; returns whether the server has a model.

    Asks the server each time: a restarted server may not know earlier evaluations.
    """
    if status.HasField("evaluation") and status.evaluation.version == status.version:
        return True
    try:
        score = evaluator.evaluate()
    except NotInitialized:
        log.info("waiting: the server has no model yet; the first worker provides it")
        return False
    accuracy = None if score.accuracy is None else round(score.accuracy, 4)
    log.info("evaluated", version=score.version, loss=round(score.loss, 4), accuracy=accuracy)
    return True
