"""Slips in the first lines of a loop: each gets an error that says what to write instead, and the next attempt works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from client.sampler_helpers import SAMPLES, Numbers
from gem_client import InvalidRequest, Session, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.server import Live, serving
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


def read_before() -> Any:
    """A generator that was read."""
    given = nn.Linear(1, 1).named_parameters()
    list(given)
    return given


def inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(1, 1)


NAMES: list[tuple[Any, str]] = [
    (nn.Linear(1, 1), r"names= is a Linear: give names=model\.named_parameters\(\)"),
    (["weight", "bias"], "names= has pairs of a name and a parameter, not a str"),
    (list(nn.Linear(1, 1).parameters()), "names= has pairs of a name and a parameter, not a Parameter"),
    ({}, "names= is empty, as a generator is that was read before"),
    (iter(()), "names= is empty"),
]
SLIPS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda session: ANY_OPTIMIZER(nn.Linear(1, 1), session), "not the model: Optimizer.model.named_parameters"),
    (lambda session: ANY_OPTIMIZER(session, nn.Linear(1, 1).named_parameters()), "the session comes second"),
    (lambda session: ANY_OPTIMIZER(None, session), "parameters or an optimizer of PyTorch, not a NoneType"),
    (lambda session: ANY_OPTIMIZER(torch.ones(1), session), "parameters or an optimizer of PyTorch, not a Tensor"),
    (lambda session: ANY_OPTIMIZER([1.0], session), r"a parameter is a tensor, not 1\.0: give model.named_parameters"),
    (lambda session: ANY_OPTIMIZER(read_before(), session), "their generator was read before"),
    *[
        (lambda session, make=make: ANY_OPTIMIZER(make(), session), advice)
        for make, advice in (
            (lambda: [{"params": list(nn.Linear(1, 1).parameters()), "lr": 0.1}], "parameter groups belong to an optimizer"),
            (lambda: [("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))], "'phase' has dtype torch.complex64"),
            (lambda: nn.Linear(1, 1).requires_grad_(False).named_parameters(), "at least one parameter to train"),
            (lambda: nn.Linear(2, 2, device="meta").named_parameters(), "'weight' is on the meta device"),
            (lambda: nn.LazyLinear(2).named_parameters(), "has no shape yet: call the model"),
            (lambda: torch.optim.AdamW(nn.LazyLinear(2).named_parameters()), "has no shape yet"),
        )
    ],
    *[
        (lambda session, names=names: ANY_OPTIMIZER(nn.Linear(1, 1).parameters(), session, names=names), advice)
        for names, advice in NAMES
    ],
    (lambda session: ANY_OPTIMIZER(inference().parameters(), session), "'0', a Parameter, can't be read and written in place"),
    (lambda session: ANY_OPTIMIZER([torch.zeros(1, requires_grad=True).expand(3)], session), "computed from other tensors"),
    (lambda session: ANY_OPTIMIZER([nn.Parameter(torch.zeros(1).expand(3))], session), "one dense tensor"),
    *[
        (lambda session, project=project: ANY_OPTIMIZER(nn.Linear(1, 1).parameters(), session, project=project), advice)
        for project, advice in (
            (0.01, "project is a function without arguments .*, not 0.01"),
            (lambda model: None, "project is called without arguments, but .* 'model'"),
        )
    ],
    (lambda _: ANY_OPTIMIZER(nn.Linear(1, 1).parameters(), "host:1"), r"open one with gem_client.connect\('host:1'\)"),
    (lambda _: ANY_OPTIMIZER(nn.Linear(1, 1).parameters(), None), "the session that gem_client.connect returns"),
    (lambda session: made(session).step(torch.ones(())), r"step\(loss=loss\): the first argument is a closure, not a Tensor"),
    (lambda session: made(session).step(loss="x"), "loss is a number or a one-element tensor, not 'x'"),
    (lambda session: made(session).step(loss=torch.ones(2)), "loss is a number or a one-element tensor"),
    *[(lambda session, loss=loss: made(session).note(loss), "a loss is a number") for loss in ("x", torch.ones(2), None)],
    (lambda session: made(session).skip(), "has no sampler"),
    (after_the_end, "has left the run, by load_final or pull_final"),
    (lambda _: ANY_SAMPLER("host:1", Numbers(SAMPLES)), r"open one with gem_client.connect\('host:1'\)"),
    (lambda session: ANY_SAMPLER(session, Endless()), "needs __len__ and __getitem__, which an Endless lacks"),
    (lambda session: ANY_SAMPLER(session, iter([])), "needs __len__ and __getitem__"),
    (lambda session: ANY_SAMPLER(session, DataLoader(Numbers(SAMPLES))), "give the data set, not a DataLoader"),
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One server for all: none of the workers makes a commit."""
    with serving() as server:
        yield server


@pytest.mark.parametrize(("slip", "advice"), SLIPS)
def test_a_slip_is_told_with_what_to_write(live: Live, slip: Callable[[Any], Any], advice: str) -> None:
    with connect(live.address) as session, pytest.raises(InvalidRequest, match=advice):
        slip(session)


def test_names_for_a_part_of_the_parameters_alone_are_refused(live: Live) -> None:
    """The others would be named by their position. A mapping of all is as good as pairs."""
    model = nn.Linear(1, 1)
    with connect(live.address) as session:
        for given in (model.parameters(), torch.optim.SGD(model.parameters())):
            with pytest.raises(InvalidRequest, match=r"names= lacks the parameter at position 1, of shape \(1,\)"):
                Optimizer(given, session, names=[("weight", model.weight)])
        assert session.generation == 0
        Optimizer(dict(model.named_parameters()), session, names=dict(model.named_parameters()))  # type: ignore[arg-type]
        assert [tensor.name for tensor in session.layout.tensors] == ["weight", "bias"]


@pytest.mark.parametrize(("dtype", "lines"), [(torch.float64, 1), (torch.float32, 0), (torch.bfloat16, 0)])
def test_double_precision_that_the_server_rounds_is_told(
    live: Live, dtype: torch.dtype, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(live.address) as session:
        Optimizer(nn.Linear(1, 1, dtype=dtype).named_parameters(), session)
    told = [record.getMessage() for record in caplog.records if "float64" in record.getMessage()]
    assert told == ["2 parameters are float64, such as weight: the run's θ and its commits round them to float32"] * lines


@pytest.mark.parametrize("settings", [{"batch_size": 64}, {"shuffle": True}, {"sampler": []}, {"drop_last": True}])
def test_settings_of_a_loader_that_the_sampler_decides_are_refused(live: Live, settings: dict[str, Any]) -> None:
    with connect(live.address) as session:
        made(session)
        sampler = ShardSampler(session, Numbers(SAMPLES))
        with pytest.raises(InvalidRequest, match=rf"leave .*{next(iter(settings))}.* out of loader"):
            sampler.loader(**settings)
        assert next(iter(sampler.loader(pin_memory=False))) is not None
