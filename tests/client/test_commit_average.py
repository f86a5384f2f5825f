"""A teacher that averages a model over the commits of all workers: it follows the run, whoever computes, and from when on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pytest
import torch
from client.torch_helpers import flat, flat_tensors, network, take_step
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, Session, connect
from gem_client.torch import CommitAverage, Optimizer
from kit.model import PLAIN, Array, theta
from kit.server import Live, config, serving
from torch import nn

DECAY, STEPS = 0.95, 80


class Worker(NamedTuple):
    """A worker with a teacher, and one that it averages by its own steps alone."""

    student: nn.Module
    teacher: CommitAverage
    own: list[Array]
    optimizer: Optimizer
    session: Session

    def step(self, number: int) -> None:
        take_step(self.student, self.optimizer, number)
        self.teacher.update_parameters(self.student)
        self.own[0] = DECAY * self.own[0] + (1 - DECAY) * flat(self.student)


def joined(live: Live, name: str, open_: ExitStack) -> Worker:
    session = open_.enter_context(connect(live.address, name=name))
    student = network(len(name))
    optimizer = Optimizer(student.named_parameters(), session)
    teacher = CommitAverage(student, optimizer, DECAY)
    return Worker(student, teacher, [flat(teacher.module)], optimizer, session)


@pytest.fixture
def plain() -> Iterator[Live]:
    with serving(config(Hyperparameters(rule="downpour", learning_rate=0.05))) as live:
        yield live


def apart(one: Array, other: Array) -> float:
    return float(np.linalg.norm(one - other))


def test_with_one_worker_it_is_the_average_of_pytorch_from_the_first_step(plain: Live) -> None:
    with ExitStack() as open_:
        ann = joined(plain, "ann", open_)
        for number in range(9):
            ann.step(number)
        np.testing.assert_allclose(flat(ann.teacher.module), ann.own[0], rtol=1e-6, atol=1e-7)


def test_with_several_workers_it_follows_the_run_and_not_its_workers_own_steps(plain: Live) -> None:
    """Of one that joins late, too: its model is not the random one that it began with, but θ."""
    with ExitStack() as open_:
        crew = [joined(plain, name, open_) for name in ("a", "bb", "ccc")]
        exact = theta(plain)
        for number in range(STEPS):
            if number == STEPS - 6:
                crew.append(joined(plain, "late", open_))
                assert apart(flat(crew[-1].teacher.module), theta(plain)) == 0
            crew[number % len(crew)].step(number)
            exact = DECAY * exact + (1 - DECAY) * theta(plain)
        lag = apart(exact, theta(plain))
        for each in crew[:3]:
            assert apart(flat(each.teacher.module), exact) < 0.3 * lag
            assert apart(each.own[0], exact) > 0.6 * lag
        assert apart(flat(crew[3].teacher.module), theta(plain)) < lag


def test_all_kinds_of_parameters_are_averaged_alike(plain: Live) -> None:
    """PyTorch averages those of each dtype and device in a call of its own."""
    with ExitStack() as open_:
        session = open_.enter_context(connect(plain.address))
        student = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1).bfloat16(), nn.BatchNorm1d(1))
        optimizer = Optimizer(student.named_parameters(), session)
        teacher, last = CommitAverage(student, optimizer, 0.0), student[2]
        for parameter in student.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert isinstance(last.running_mean, torch.Tensor)
        last.running_mean.fill_(3.0)
        teacher.update_parameters(student)
        np.testing.assert_array_equal(flat(teacher.module), flat(student))
        assert teacher.module.state_dict()["2.running_mean"] == 3, "buffers are copied"


def test_it_begins_at_the_average_that_the_run_keeps_also_of_a_part_of_the_model() -> None:
    settings = Hyperparameters(rule="downpour", learning_rate=0.05, average=0.9)
    with serving(config(settings)) as live, ExitStack() as open_:
        first = joined(live, "a", open_)
        for number in range(9):
            first.step(number)
        late = joined(live, "late", open_)
        kept = live.on_loop(lambda: live.core.central.average.copy())
        np.testing.assert_array_equal(flat(late.teacher.module), kept)
        assert apart(kept, theta(live)) > 0
        part = CommitAverage(list(late.student.children())[2], late.optimizer, DECAY)
        np.testing.assert_array_equal(flat_tensors(part.module.parameters()), kept[-9:])


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_another_decay_is_refused(decay: float) -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        student = network()
        with pytest.raises(InvalidRequest, match="decay is a number from 0 to 1, not"):
            CommitAverage(student, Optimizer(student.named_parameters(), session), decay)
