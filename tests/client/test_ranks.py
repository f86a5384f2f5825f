"""Several ranks that are one worker together: what needs no second process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client.sampler_helpers import Numbers
from client.torch_helpers import flat, network, take_step
from gem_client import Admin, GemError, InvalidRequest, LeaseEnded, NonFiniteGradient, ServerUnavailable, connect
from gem_client.torch import Optimizer, ShardSampler, connect_ranks, rank_session, ranks
from kit.server import serving
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[Any]:
    """A wrapped network, in a group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield DistributedDataParallel(network())
    dist.destroy_process_group()


@pytest.mark.parametrize(("samples", "count", "whole"), [(8, 2, 8), (7, 2, 8), (3, 4, 16), (1, 4, 16), (4, 4, 4), (2, 4, 4)])
def test_ranks_get_equal_parts_of_a_batch_that_hold_all_its_samples(samples: int, count: int, whole: int) -> None:
    batch = list(range(100, 100 + samples))
    parts = [ranks.part_of(batch, number, count, whole) for number in range(count)]
    dealt = Counter(sample for part in parts for sample in part)
    assert set(dealt) == set(batch)
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) >= min(2, whole // count)  # BatchNorm fails on a single sample
    assert max(dealt.values()) - min(dealt.values()) <= 1


class FSDPLinear(nn.Linear):
    """A module as FSDP2 makes them: of a class with such a name."""


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (nn.Linear(1, 1), "not a Linear: it averages"),
        ("group", "not a str: it averages"),
        (FSDPLinear(1, 1), "is a FSDPLinear: each rank holds a part"),
    ],
)
def test_a_model_whose_gradients_nobody_averages_is_refused(model: Any, advice: str) -> None:
    with pytest.raises(InvalidRequest, match=advice):
        connect_ranks("127.0.0.1:1", model)


def test_what_the_ranks_can_not_train_together_is_refused(ddp: Any) -> None:
    other = network()
    made: list[tuple[Any, str]] = [
        ([*ddp.named_parameters(), *other.named_parameters("other")], "'other.0.weight' is not in the model"),
        (torch.optim.LBFGS(ddp.parameters()), "LBFGS is not available"),
    ]
    for params, why in made:
        with pytest.raises(InvalidRequest, match=why):
            Optimizer(params, connect_ranks("127.0.0.1:1", ddp))


def test_a_single_rank_trains_as_a_plain_worker_under_the_same_names(ddp: Any) -> None:
    alone = network()
    with serving() as live, connect(live.address) as session:
        optimizer = Optimizer(torch.optim.AdamW(alone.named_parameters()), session)
        for step in range(3):
            take_step(alone, optimizer, step)
        layout, settings = session.layout, session.hyperparameters
    with serving() as live, connect_ranks(live.address, ddp) as together:
        optimizer = Optimizer(torch.optim.AdamW(ddp.parameters()), together)
        for step in range(3):
            take_step(ddp, optimizer, step, loss=torch.tensor(0.5))
        assert together.layout == layout
        assert together.hyperparameters == settings
        assert (together.version, together.steps_done, together.is_first) == (3, 3, True)
        assert optimizer.answer is not None
        assert (optimizer.answer.version, optimizer.answer.lost) == (3, False)
        with Admin(live.address) as admin:
            assert admin.status().training_loss == 0.5
    assert flat(ddp).tolist() == flat(alone).tolist()


def test_a_rank_that_joined_nothing_says_so(ddp: Any) -> None:
    session = connect_ranks("127.0.0.1:1", ddp)
    with pytest.raises(InvalidRequest, match="has not joined"):
        _ = session.hyperparameters
    with pytest.raises(InvalidRequest, match="has not joined"):
        ShardSampler(session, Numbers(4))


def test_rank_0_says_that_it_waits_for_the_server(ddp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends a group that is silent for half an hour, and a run may take longer to end."""
    monkeypatch.setattr(ranks, "BEAT_SECONDS", 0.001)
    group, told, done = ranks.Ranks(ddp), [], threading.Event()

    def send(message: Any) -> None:
        told.append(message)
        if len(told) == 3:
            done.set()

    monkeypatch.setattr(group, "_send", send)

    def wait() -> dict[str, Any]:
        assert done.wait(20)
        return {"result": 7}

    assert group.first(wait) == {"result": 7}
    assert told[:3] == [None, None, None]
    assert told[-1] == {"result": 7}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NonFiniteGradient("a NaN"), NonFiniteGradient),
        (ServerUnavailable("gone"), ServerUnavailable),
        (LeaseEnded("over", "replaced"), LeaseEnded),
        (KeyError("a bug"), GemError),
    ],
)
def test_an_error_of_rank_0_is_the_same_on_the_others(error: Exception, kind: type[Exception], ddp: Any) -> None:
    session = rank_session.RankSession(ranks.Ranks(ddp), connect("127.0.0.1:1"))

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        session.first(fail)
    assert raised.value is error
    told = rank_session._error(*session._outcome(fail)["error"])
    assert type(told) is kind
    assert getattr(told, "reason", "") == getattr(error, "reason", "")
    assert str(error) in str(told)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error\nmore"), True),
        (dist.DistBackendError("NCCL"), True),
        (RuntimeError("shapes differ"), False),
        (None, False),
    ],
)
def test_only_what_a_lost_rank_causes_is_called_so(error: Exception | None, lost: bool) -> None:
    found = ranks.lost_rank(error)
    assert (found is not None) == lost
    assert "\n" not in str(found)
