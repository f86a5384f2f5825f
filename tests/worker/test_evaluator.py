"""gem-evaluator against a real server: as a separate process, or in this one if only its exit status matters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_client import Admin, Retry, Session, connect
from gem_worker.evaluation import evaluator
from gem_worker.evaluation.evaluate import Evaluator, RemoteEvaluator
from gem_worker.tasks import Task, load_task
from gem_worker.tasks.digits import Digits
from kit.model import GRADIENT, model
from kit.process import Process, running
from kit.server import Live, config, serving, wait_until
from kit.settings import configured
from torch import nn
from torch.utils.data import TensorDataset

NOBODY = "127.0.0.1:1"
LINE = '''
import kit.task


class Line(kit.task.Line):
    """What is nearer than 1 counts as right."""

    def correct(self, model, batch):
        return int(((model(batch[0]) - batch[1]).abs() < 1).sum())
'''


def parameters(network: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}


def evaluation(live: Live) -> Any:
    """What the server says of the last evaluation; None where it knows of none."""
    with Admin(live.address) as admin:
        status = admin.status()
    return status.evaluation if status.HasField("evaluation") else None


def evaluated(live: Live, version: int) -> bool:
    found = evaluation(live)
    return found is not None and found.version == version


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task above; by name it is line_task:Line, here and in processes that are started here."""
    (tmp_path / "line_task.py").write_text(LINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "line_task", raising=False)
    return load_task("line_task:Line", None)


@pytest.fixture
def worker(live: Live, line: Task) -> Iterator[Session]:
    """A session that trains the line; its first value is y = 0."""
    with connect(live.address, name="worker") as session:
        session.join({"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)})
        yield session


# -- as a process


EVALUATOR = "gem_worker.evaluation.evaluator"


def versions(process: Process) -> list[int]:
    """Those that an evaluator says it has evaluated, but for the first value."""
    return [entry["version"] for entry in process.events("evaluated") if entry["version"]]


@pytest.mark.long
def test_it_waits_for_a_model_evaluates_each_version_once_and_ends_when_told(tmp_path: Path, live: Live, line: Task) -> None:
    """Also again after the server has forgotten, as it does when it comes back from a checkpoint."""
    arguments = (f"--server={live.address}", "--task=line_task:Line", configured(evaluate_every=0.1))
    with running(tmp_path, "-m", EVALUATOR, *arguments) as process:
        process.until_it_says("waiting: the server has no model yet; the first worker provides it")
        with connect(live.address, name="worker") as session:
            session.join(parameters(line.model()))
            for version in (1, 2):
                session.commit(np.full(2, 0.5, np.float32))
                wait_until(partial(evaluated, live, version), f"version {version} to be evaluated")
            assert live.on_loop(lambda: [lease.worker for lease in live.core.leases.live.values()]) == ["worker"]
        live.on_loop(lambda: setattr(live.server.wiring.progress, "evaluation", None))
        wait_until(partial(evaluated, live, 2), "version 2 to be evaluated again")
        wait_until(lambda: len(versions(process)) >= 3, "the evaluator to say so")
        assert process.end() == 0
        assert process.events("stopped")
        assert versions(process) == [1, 2, 2]
        assert {entry["worker"] for entry in process.entries} == {"evaluator"}


# -- in this process


def test_batch_norm_has_the_statistics_of_training_data(line: Task) -> None:
    """They are no part of θ. A new model has a mean of 0 and a variance of 1."""
    inputs = torch.linspace(50, 150, 1001).unsqueeze(1)
    data = TensorDataset(inputs, (inputs - 100) / 10)

    class Normalising(type(line)):  # type: ignore[misc]
        def model(self) -> nn.Module:
            return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))

        def training_data(self) -> TensorDataset:
            return data

        test_data = training_data

    task = Normalising(None)
    deviation = float(inputs.std(correction=0))
    layout = Layout.of({"0.weight": (1,), "0.bias": (1,), "1.weight": (1, 1), "1.bias": (1,)})
    exact = np.array([1, 0, deviation / 10, 0], np.float32)
    evaluator = Evaluator(task)
    for _ in range(2):
        assert evaluator.score(0, layout, exact).loss < 0.01  # the targets' variance is 8


def test_a_compiled_model_is_evaluated_with_the_tensors_of_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` wraps a model in a module `_orig_mod`."""
    digits, plain = Digits(None), Digits(None).model()
    arrays = parameters(plain)
    layout = Layout.of((name, array.shape) for name, array in arrays.items())
    theta = np.concatenate([array.ravel() for array in arrays.values()])
    expected = Evaluator(digits).score(0, layout, theta)

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Digits.model(digits)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self._orig_mod(inputs))

    monkeypatch.setattr(digits, "model", Compiled)
    assert Evaluator(digits).score(0, layout, theta) == expected


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **more: Any) -> None:
        self.entries.append((event, more))

    error = warning = info


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What the command logs; it leaves the signals and the logging of the tests' process alone."""
    kept = Log()
    monkeypatch.setattr(evaluator, "stop_on_signals", lambda: None)
    monkeypatch.setattr(evaluator, "log_as", lambda name: None)
    monkeypatch.setattr("gem_worker.evaluation.evaluator.logs.configure", lambda *settings: kept)
    return kept


def run(*arguments: str) -> int:
    """The exit status of `gem-evaluator --once`."""
    settings = dict.fromkeys((name for name in os.environ if name.startswith("GEM_")), None)
    return CliRunner().invoke(evaluator.main, ["--once", *arguments], env=settings).exit_code


def test_it_reports_loss_and_accuracy_of_what_the_server_holds(live: Live, worker: Session, log: Log) -> None:
    """y = 0 is off by less than 1 for the samples above 0."""
    assert run("--server", live.address, "--task", "line_task:Line") == 0
    found = evaluation(live)
    assert found is not None
    assert (found.version, found.loss, found.accuracy) == (0, pytest.approx(2.376, abs=0.001), pytest.approx(31 / 64))
    assert [event for event, _ in log.entries] == ["evaluated"]


def test_a_task_without_right_answers_is_reported_without_an_accuracy(
    live: Live, worker: Session, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("line_task.Line.correct", lambda self, model, batch: None)
    assert run("--server", live.address, "--task", "line_task:Line") == 0
    found = evaluation(live)
    assert found is not None
    assert not found.HasField("accuracy")


def test_what_the_server_knows_already_is_not_evaluated_again(live: Live, worker: Session, log: Log) -> None:
    with Admin(live.address) as admin:
        admin.report_evaluation(0, 7.0)
    assert run("--server", live.address, "--task", "line_task:Line") == 0
    found = evaluation(live)
    assert found is not None
    assert found.loss == 7.0
    assert log.entries == []


@pytest.mark.parametrize("name", ["digit", "line_task:Circle"])  # before PyTorch is imported, and after
def test_a_task_that_is_none_is_wrong_use(line: Task, log: Log, name: str) -> None:
    assert run("--server", NOBODY, "--task", name) == 2
    ((event, more),) = log.entries
    assert event == "the task can't be loaded"
    assert name.partition(":")[0] in more["why"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (model(), "use the same --task as the workers"),
        ({"weight": np.zeros((2, 1), np.float32), "bias": np.zeros(2, np.float32)}, "use the same --task as the workers"),
        ({"0": GRADIENT}, "names=model.named_parameters()"),
    ],
    ids=["names", "shapes", "no names"],
)
def test_a_run_that_trains_another_model_is_a_failure_that_says_so(
    live: Live, line: Task, log: Log, other: dict[str, Any], says: str
) -> None:
    with connect(live.address) as session:
        session.join(other)
    assert run("--server", live.address, "--task", "line_task:Line") == 1
    ((_, more),) = log.entries
    assert more["error"] == "LayoutMismatch"
    assert says in more["why"]
    assert evaluation(live) is None


def test_a_run_that_keeps_an_average_is_evaluated_by_it(line: Task) -> None:
    """Every time it is asked: a resumed run may have begun one."""
    settings = Hyperparameters(rule="downpour", learning_rate=1.0, average=0.75)
    with serving(config(settings)) as live, connect(live.address) as session:
        session.join({"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)})
        session.commit(np.full(2, -1.0, np.float32))  # θ is 1, and the average 0.25
        remote = RemoteEvaluator(live.address, line, Retry())
        layout = session.layout
        for average, value in ((0.75, 0.25), (0.0, 1.0)):
            changed = replace(settings, average=average)
            live.on_loop(partial(live.core.change, changed))
            score = remote.evaluate()
            assert score == Evaluator(line).score(1, layout, np.full(2, value, np.float32))
            np.testing.assert_array_equal(remote.theta, np.full(2, value, np.float32))
            assert evaluation(live).loss == score.loss
        remote.close()


def test_a_server_out_of_reach_for_too_long_is_a_failure(line: Task, log: Log) -> None:
    assert run("--server", NOBODY, "--task", "line_task:Line", configured(give_up_after=1)) == 1
    ((event, more),) = log.entries
    assert (event, more["error"]) == ("the evaluation failed", "ServerUnavailable")


def test_not_to_wait_for_a_server_is_no_reason_not_to_wait_for_its_answers(live: Live, worker: Session, log: Log) -> None:
    for _ in range(10):  # an answer may come in no time by chance
        assert run("--server", live.address, "--task", "line_task:Line", configured(give_up_after=0)) == 0
    assert evaluation(live) is not None


def test_a_server_that_restarts_while_its_model_is_evaluated_gets_the_report(tmp_path: Path, line: Task) -> None:
    """It is away when the report is sent, and back when it is sent again."""
    with serving(config(checkpoint_dir=tmp_path / "checkpoints")) as live:
        with connect(live.address) as session:
            session.join(parameters(line.model()))
            session.commit(np.ones(2, np.float32))
        back: list[Live] = []

        def come_back(seconds: float) -> None:
            if not back:
                back.append(Live(replace(live.config, listen=live.address, resume=True)))

        class Interrupted(type(line)):  # type: ignore[misc]
            def loss(self, model: nn.Module, batch: Any) -> Any:
                live.stop()
                return super().loss(model, batch)

        remote = RemoteEvaluator(live.address, Interrupted(None), Retry(sleep=come_back))
        try:
            assert remote.evaluate().version == 1
            assert back
            assert evaluated(back[0], 1)
        finally:
            remote.close()
            for server in back:
                server.stop()
