"""A run to checkpoint, and a server that crashes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_server.config import ServerConfig
from gem_server.core.state_machine import Core
from kit.core import SMALL, commit, header, make_core, start
from kit.regions import abstract
from kit.server import Live

WORKERS = ["ann", "bob"]
FILES = ["model.safetensors", "workers.safetensors", "state.json"]


def trained(settings: Hyperparameters | None = None, layout: Layout = SMALL, commits: int = 5) -> Core:
    """A core in the middle of a run: commits, a shard done, two held, one returned, a lease that has ended."""
    core = make_core(settings)
    random = np.random.default_rng(1)
    leases = start(core, [*WORKERS, "cy"], layout, random.normal(size=layout.size))
    for number in range(commits):
        lease_id = leases[number % 2]
        sequence = core.leases.get(lease_id).sequence + 1
        commit(core, lease_id, sequence, random.normal(size=layout.size), loss=0.5 / (number + 1), samples=32)
    for lease_id in (leases[0], leases[0], leases[1], leases[2]):
        core.lease_shard(lease_id, 1000, 0.0)
    core.complete_shard(leases[0], 1, 0.0)
    core.leave(leases[2])
    core.admit(header(core, leases[0], core.leases.get(leases[0]).sequence), 0.0)  # a repeat, to be counted
    return core


def crashed(live: Live, where: Path) -> ServerConfig:
    """What to start a server with that goes on where a kill -9 would leave this one now, on another port."""
    assert live.config.checkpoint_dir is not None
    shutil.copytree(live.config.checkpoint_dir, where)
    return replace(live.config, checkpoint_dir=where, resume=True, memory_socket=abstract())
