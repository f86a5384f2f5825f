"""Slips in the first lines of a loop: each gets an error that says what to write instead, and the next attempt works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from client.sampler_helpers import SAMPLES, Numbers
from gem_client import InvalidRequest, Session, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.server import Live
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 1


ANY_OPTIMIZER: Any = Optimizer  # slips are of wrong types
ANY_SAMPLER: Any = ShardSampler


def made(session: Session) -> Any:
    return Optimizer(nn.Linear(1, 1).named_parameters(), session)


def after_the_end(session: Session) -> None:
    optimizer = made(session)
    optimizer.load_final()
    optimizer.step()


SLIPS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda session: ANY_OPTIMIZER(nn.Linear(1, 1), session), "not the model: Optimizer.model.named_parameters"),
    (lambda session: ANY_OPTIMIZER(session, nn.Linear(1, 1).named_parameters()), "the session comes second"),
    (lambda session: ANY_OPTIMIZER(None, session), "parameters or an optimizer of PyTorch, not a NoneType"),
    (lambda session: ANY_OPTIMIZER(torch.ones(1), session), "parameters or an optimizer of PyTorch, not a Tensor"),
    (lambda _: ANY_OPTIMIZER(nn.Linear(1, 1).parameters(), "host:1"), r"open one with gem_client.connect\('host:1'\)"),
    (lambda _: ANY_OPTIMIZER(nn.Linear(1, 1).parameters(), None), "the session that gem_client.connect returns"),
    (lambda session: made(session).step(torch.ones(())), r"step\(loss=loss\): the first argument is a closure, not a Tensor"),
    (lambda session: made(session).step(loss="x"), "loss is a number or a one-element tensor, not 'x'"),
    (lambda session: made(session).step(loss=torch.ones(2)), "loss is a number or a one-element tensor"),
    *[(lambda session, loss=loss: made(session).note(loss), "a loss is a number") for loss in ("x", torch.ones(2), None)],
    (after_the_end, "has left the run, by load_final or pull_final"),
    (lambda _: ANY_SAMPLER("host:1", Numbers(SAMPLES)), r"open one with gem_client.connect\('host:1'\)"),
    (lambda session: ANY_SAMPLER(session, Endless()), "needs __len__ and __getitem__, which a Endless lacks"),
    (lambda session: ANY_SAMPLER(session, iter([])), "needs __len__ and __getitem__"),
    (lambda session: ANY_SAMPLER(session, DataLoader(Numbers(SAMPLES))), "give the data set, not a DataLoader"),
]


@pytest.mark.parametrize(("slip", "advice"), SLIPS)
def test_a_slip_is_told_with_what_to_write(live: Live, slip: Callable[[Any], Any], advice: str) -> None:
    with connect(live.address) as session, pytest.raises(InvalidRequest, match=advice):
        slip(session)


@pytest.mark.parametrize("settings", [{"batch_size": 64}, {"shuffle": True}, {"sampler": []}, {"drop_last": True}])
def test_settings_of_a_loader_that_the_sampler_decides_are_refused(live: Live, settings: dict[str, Any]) -> None:
    with connect(live.address) as session:
        made(session)
        sampler = ShardSampler(session, Numbers(SAMPLES))
        with pytest.raises(InvalidRequest, match=rf"leave .*{next(iter(settings))}.* out of loader"):
            sampler.loader(**settings)
        assert next(iter(sampler.loader(pin_memory=False))) is not None
