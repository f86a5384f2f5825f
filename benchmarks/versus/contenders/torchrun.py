"""Starts the processes of PyTorch's distributed training as torchrun does, by the agents of torch.distributed.elastic.

If no worker is killed, one agent starts all workers. Otherwise each worker has an agent of its own, as on machines of their
own, and all agents meet again whenever one has gone or come back. Workers are forked, so that a restart costs no imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from gem_worker.launcher.cluster import free_port
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.lib import wire
from benchmarks.versus.family import Family, end_with_parent
from benchmarks.versus.setup import Setup

Work = Callable[[Setup, int], None]
# The shortest that torchrun takes, in seconds (its defaults are 30, 5 and 3): how long it waits for further machines once there
# are enough, how often a machine says that it is alive, and how often it may fail to.
_RENDEZVOUS = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 2, "timeout": 300}
_HOSTING = {"is_host": True}  # it does not take the address of a wire for its own
_RESTARTS = 10_000
_MONITOR_SECONDS = 0.05


class Torchrun:
    """The agents of a run."""

    def __init__(self, setup: Setup, family: Family, work: Work) -> None:
        self._setup, self._family, self._work, self.members = setup, family, work, len(setup.members)
        self._endpoint = f"{setup.host}:{free_port()}"
        os.environ["GLOO_SOCKET_IFNAME"] = wire.DEVICE if setup.kind.far else "lo"
        # Agents count restarts differently: with one store for all rounds, workers find addresses of an earlier round in it.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if setup.kind.killed_every:
            for worker in setup.members:
                self.revive(worker)
        else:
            family.start("agent", _agent, self._config(1, self.members), work, setup, None)

    def revive(self, worker: int) -> None:
        config = self._config(self.members, 1)
        self._family.start(f"worker-{worker}", _agent, config, self._work, self._setup, worker)

    def _config(self, machines: int, workers: int) -> LaunchConfig:
        return LaunchConfig(
            min_nodes=max(1, machines - 1),
            max_nodes=machines,
            nproc_per_node=workers,
            run_id="versus",
            rdzv_backend="c10d",
            rdzv_endpoint=self._endpoint,
            rdzv_configs={**_RENDEZVOUS, **_HOSTING} if self._setup.kind.far else dict(_RENDEZVOUS),
            max_restarts=_RESTARTS if self._setup.kind.killed_every else 0,
            monitor_interval=_MONITOR_SECONDS,
            start_method="fork",
            local_addr=self._setup.host,
        )


def _agent(config: LaunchConfig, work: Work, setup: Setup, worker: int | None) -> None:
    elastic_launch(config, _work)(work, setup, worker)


def _work(work: Work, setup: Setup, worker: int | None) -> None:
    """The body of a worker's process. Its rank counts those that take part. With an agent of its own, ranks change: it has its
    number."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's own handler would wait for the end of an all-reduce
    number = setup.members[int(os.environ["RANK"])] if worker is None else worker
    setup.take_place(number)
    work(setup, number)


def checkpoint_path(setup: Setup) -> Path:
    """The checkpoint that all workers resume from after a restart."""
    return setup.path / "checkpoint.pt"
