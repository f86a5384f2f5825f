"""The authors' exchange: point-to-point messages of torch.distributed (gloo), with the rescaling on the worker.

A round trip is a pull, π on the worker, and a commit of the rescaled update, which the server adds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.peers.contenders.base import HOST, START_SECONDS, OwnProcess, Place, RoundTrip, gradient, one_thread
from benchmarks.peers.contenders.equations import ETA, rescaled

_PULL, _COMMIT = 0, 1  # the requests: the value of a worker's one-element message


class Gloo(OwnProcess):
    """Rank 0 serves requests in the order in which they arrive, from any worker."""

    def serve(self, place: Place, ready: Event) -> None:
        import torch
        from torch import distributed

        one_thread()
        ready.set()
        _join(place, 0)
        theta, update = torch.zeros(place.parameters), torch.zeros(place.parameters)
        request = torch.zeros(1, dtype=torch.int64)
        while True:
            worker = distributed.recv(request)
            if request.item() == _PULL:
                distributed.send(theta, worker)
            else:
                distributed.recv(update, worker)
                theta += update

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        import torch
        from torch import distributed

        one_thread()
        _join(place, index + 1)
        outgoing = torch.from_numpy(gradient(place, index))
        theta, moment, snapshot = (torch.zeros(place.parameters) for _ in range(3))
        pull, commit = torch.tensor([_PULL]), torch.tensor([_COMMIT])

        def update() -> Any:
            if self.rule == "add":
                return outgoing * -ETA
            rescaled_update = rescaled(torch, theta, outgoing, moment, snapshot)
            snapshot.copy_(theta)
            return rescaled_update

        def round_trip() -> Any:
            distributed.send(pull, 0)
            distributed.recv(theta, 0)
            send = update()
            distributed.send(commit, 0)
            distributed.send(send, 0)
            return theta

        yield round_trip


def _join(place: Place, rank: int) -> None:
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{HOST}:{place.port}",
        rank=rank,
        world_size=place.workers + 1,
        timeout=timedelta(seconds=START_SECONDS),
    )


GLOO = (Gloo("gloo-gem", "authors' exchange on gloo, GEM"), Gloo("gloo-add", "authors' exchange on gloo, plain add", "add"))
