"""Tasks, and a worker that trains on them against a real server."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import Retry, connect
from gem_worker.evaluation.evaluate import Evaluator
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.trainer import run_hyperparameters, train
from gem_worker.tasks import Task, TaskError, load_task
from gem_worker.tasks.convnet import ConvNet
from gem_worker.tasks.digits import Digits
from kit.server import Live, config, serving
from kit.task import SAMPLES, Line
from prometheus_client.registry import CollectorRegistry
from torch import Tensor, nn

TINY = Hyperparameters(rule="downpour", learning_rate=0.2, batch_size=16, shard_size=32, epochs=10, seed=5)


def run(live: Live, task: Task, name: str = "a") -> tuple[int, CollectorRegistry]:
    """One worker's whole run; its commits and its metrics."""
    registry = CollectorRegistry()
    with connect(live.address, name=name) as session:
        steps = train(task, session, run_hyperparameters(live.address, Retry()), WorkerMetrics(registry))
    return steps, registry


def score(live: Live, task: Task) -> float:
    """Loss of the present θ."""
    with connect(live.address) as reader:
        theta = reader.pull()
        return Evaluator(task).score(reader.version, reader.layout, theta).loss


# -- training


def test_training_learns_counts_every_sample_and_exports_its_steps_by_phase() -> None:
    task = Line()
    with serving(config(TINY)) as live:
        steps, registry = run(live, task)
        assert steps == 10 * SAMPLES // 16
        assert live.on_loop(lambda: live.core.samples_committed) == 10 * SAMPLES
        assert live.on_loop(lambda: live.core.complete)
        torch.manual_seed(TINY.seed)
        with torch.no_grad():
            before = float(task.loss(task.model(), task.training_data()[:]))
        assert score(live, task) < before / 10
    for phase in ("data", "compute", "exchange"):
        assert registry.get_sample_value("gem_worker_step_seconds_count", {"phase": phase}) == steps
        assert (registry.get_sample_value("gem_worker_step_seconds_sum", {"phase": phase}) or 0) > 0
    loss = registry.get_sample_value("gem_worker_loss")
    assert loss is not None
    assert 0 <= loss < 0.5
    assert registry.get_sample_value("gem_worker_learning_rate") == TINY.learning_rate


def test_the_first_value_is_that_of_the_runs_seed() -> None:
    with serving(config(Hyperparameters(seed=5, steps=1, learning_rate=1e-12))) as live:
        run(live, Line(), "any name")
        torch.manual_seed(5)
        first = nn.Linear(1, 1)
        held = live.on_loop(lambda: live.core.central.theta.copy())
        np.testing.assert_allclose(held, [first.weight.item(), first.bias.item()], rtol=1e-6)


def test_training_stops_after_the_steps_of_the_run() -> None:
    with serving(config(Hyperparameters(steps=3, epochs=0, batch_size=16))) as live:
        assert run(live, Line())[0] == 3
        assert run(live, Line())[0] == 0
        assert run(live, Line(), "b")[0] == 3


def test_the_settings_are_asked_for_before_joining() -> None:
    with serving(config(TINY)) as live:
        assert run_hyperparameters(live.address, Retry()) == TINY
        assert live.on_loop(lambda: len(live.core.leases.live)) == 0


def test_an_evaluation_weighs_batches_by_their_size() -> None:
    class Uneven(Line):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = torch.cat([torch.zeros(500), torch.ones(1)])[:, None]

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return batch[0].mean()  # type: ignore[no-any-return]

        def correct(self, model: nn.Module, batch: Any) -> int:
            return int((batch[0] == 0).sum())

    with serving() as live, connect(live.address) as session:
        first = session.join({name: value.detach().numpy() for name, value in Uneven().model().named_parameters()})
        result = Evaluator(Uneven()).score(7, session.layout, first)
    assert (result.version, result.loss, result.accuracy) == pytest.approx((7, 1 / 501, 500 / 501))


# -- tasks by name


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module called `own_task` with a task, and with classes that are none."""
    own = types.ModuleType("own_task")
    own.Line = Line  # type: ignore[attr-defined]
    own.NoTask = type("NoTask", (), {"__init__": lambda self, data: None, "model": lambda self: None})  # type: ignore[attr-defined]
    own.NoData = type("NoData", (), {})  # type: ignore[attr-defined]
    own.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_task", own)
    return own


def test_a_task_of_the_users_own_is_made_with_the_folder_given(module: types.ModuleType, tmp_path: Path) -> None:
    task = load_task("own_task:Line", tmp_path)
    assert isinstance(task, Line)
    assert task.data == tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", ["'digit'", "digits", "mnist", "module:Class"]),
        ("no_such_module:Task", ["no_such_module"]),
        ("own_task:Missing", ["own_task", "Missing"]),
        ("own_task:NoTask", ["training_data", "test_data", "loss", "correct"]),
        ("own_task:NoData", ["own_task:NoData"]),
        ("own_task:number", ["own_task:number"]),
        (":Task", ["module:Class"]),
        ("my/task.py:Sine", ["not by its file", "--task my.task:Sine"]),
        ("my_task.py", ["--task my_task:Class"]),
        ("own_task:", ["own_task"]),
        ("..own_task:Line", ["own_task"]),
    ],
)
def test_a_task_that_can_not_be_loaded_says_why(module: types.ModuleType, name: str, words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(name, None)
    for word in words:
        assert word in str(caught.value)


def test_an_error_inside_the_users_module_is_not_a_missing_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_inside.py").write_text("class Line: ...\nLine.missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        load_task("wrong_inside:Line", None)


# -- the digits, and the paper's network


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits(None)


DIGITS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # how many of each the data set has, by its description


def every(images: Any) -> list[tuple[bytes, int]]:
    """Each sample's bytes and label."""
    samples = images.__getitems__(list(range(len(images))))
    return [(image.numpy().tobytes(), int(label)) for image, label in samples]


def test_the_digits_split_is_disjoint_whole_and_the_same_in_every_process(digits: Digits) -> None:
    training, test = every(digits.training_data()), every(digits.test_data())
    assert (len(training), len(test)) == (1438, 359)
    assert not {image for image, _ in training} & {image for image, _ in test}
    labels = Counter(label for _, label in training + test)
    assert [labels[digit] for digit in range(10)] == DIGITS
    torch.manual_seed(123)
    np.random.seed(123)
    again = Digits(None)
    assert (every(again.training_data()), every(again.test_data())) == (training, test)


def test_digits_are_normalised_images_of_28_by_28(digits: Digits) -> None:
    image, label = digits.training_data()[0]
    assert (tuple(image.shape), image.dtype) == ((1, 28, 28), torch.float32)
    assert 0 <= int(label) <= 9
    values = torch.stack([sample for sample, _ in digits.training_data().__getitems__(list(range(1438)))])
    assert abs(float(values.mean())) < 0.05
    assert abs(float(values.std()) - 1) < 0.05


def test_the_network_is_appendix_as_and_returns_log_probabilities() -> None:
    network = ConvNet()
    assert sum(parameter.numel() for parameter in network.parameters()) == 163_790
    output = network(torch.zeros(3, 1, 28, 28))
    assert output.shape == (3, 10)
    torch.testing.assert_close(output.exp().sum(dim=1), torch.ones(3))


def test_classification_counts_right_answers(digits: Digits) -> None:
    class Sure(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.eye(10)[torch.full((len(images),), 4)].log()

    labels = torch.tensor([4, 4, 5])
    assert digits.correct(Sure(), (torch.zeros(3, 1, 28, 28), labels)) == 2
