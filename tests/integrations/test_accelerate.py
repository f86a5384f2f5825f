"""accelerate's own wrapper around an Optimizer."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from client.brought_helpers import PLAIN, adamw, make_model, train
from gem_client import connect
from gem_client.torch import Optimizer
from kit.model import theta, version
from kit.server import config, serving


def test_a_wrapped_optimizer_trains_and_what_the_wrapper_hides_has_the_name_from_before() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        plain, accelerator = make_model(), Accelerator(cpu=True)
        ours = Optimizer(adamw(plain), session)
        model, optimizer = accelerator.prepare(plain, ours)
        train(model, optimizer, 3)
        assert version(live) == 3
        assert not hasattr(optimizer, "load_final")
        ours.load_final()
        final = session.layout.split(theta(live))
        assert all(torch.equal(value, torch.from_numpy(final[name])) for name, value in plain.named_parameters())
