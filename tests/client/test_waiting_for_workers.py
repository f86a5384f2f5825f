"""A run that waits for workers, one of which is refused: the log says so on both sides."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import LayoutMismatch, connect
from gem_client.run import shards as run_shards
from gem_client.torch import Optimizer
from kit.logs import captured
from kit.model import in_background
from kit.server import DEADLINE, config, serving, wait_until
from torch import nn

MODEL = {"w": np.ones(3)}


def test_the_servers_log_says_who_was_refused_and_how_many_are_waited_for() -> None:
    def model() -> nn.Module:
        """Its first layer is frozen, and each model draws it anew."""
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        layers[0].requires_grad_(False)
        return layers

    torch.manual_seed(0)
    with serving(config(min_workers=2)) as live, captured(logging.INFO) as said, ExitStack() as opened:
        first, second = (opened.enter_context(connect(live.address, name=name)) for name in ("ann", "bob"))
        Optimizer(torch.optim.AdamW(model().named_parameters()), first)
        with pytest.raises(LayoutMismatch, match="random ones need the same seed"):
            Optimizer(torch.optim.AdamW(model().named_parameters()), second)
    refused = [line for line in said if line["event"] == "registration refused"]
    assert [(line["worker"], line["error"], line["workers"], line["waiting_for"]) for line in refused] == [
        ("bob", "LayoutMismatch", 1, 2)
    ]
    assert "than those of worker 'ann'" in refused[0]["why"]


def test_a_worker_that_waits_for_others_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config(min_workers=2)) as live, connect(live.address, name="ann") as ann, connect(live.address) as bob:
        ann.join(MODEL)
        asked, lease_shard = Counter[str](), ann._member.lease_shard
        monkeypatch.setattr(ann._member, "lease_shard", lambda *given: asked.update(["ann"]) or lease_shard(*given))
        batch = in_background(lambda: next(iter(ann.shards(1000))))
        wait_until(lambda: asked["ann"] >= 3, "the worker to ask three times")
        bob.join(MODEL)
        assert batch.result(DEADLINE)
        assert next(iter(bob.shards(1000)))
    waited = [record.message for record in caplog.records if "waiting for" in record.message]
    assert [text.partition(" (")[0] for text in waited] == ["ann: waiting for 1 more workers: 1 of 2 are in the run"]


def test_a_worker_that_waits_long_for_the_last_shards_says_once_who_holds_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_shards, "LONG_WAIT", 3)
    settings = Hyperparameters(epochs=1, batch_size=4, shard_size=4)
    with serving(config(settings)) as live, connect(live.address, name="ann") as ann, connect(live.address, name="bob") as bob:
        ann.join(MODEL)
        bob.join(MODEL)
        shards = ann.shards(4)
        next(iter(shards))
        asked, lease_shard = Counter[str](), bob._member.lease_shard
        monkeypatch.setattr(bob._member, "lease_shard", lambda *given: asked.update(["bob"]) or lease_shard(*given))
        rest = in_background(lambda: list(bob.shards(4)))
        wait_until(lambda: asked["bob"] >= 5, "the worker to ask five times")
        ann.commit(np.zeros(3, np.float32))
        assert list(shards) == rest.result(DEADLINE) == []
    waited = [record.message for record in caplog.records if "waiting for" in record.message]
    assert [text.partition(" to finish")[0] for text in waited] == ["bob: all shards are dealt: waiting for ann"]
