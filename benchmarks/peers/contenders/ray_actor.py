"""A Ray actor that holds θ in NumPy arrays; workers are drivers that call its method and get the result."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.contenders.base import OwnProcess, Place, RoundTrip, gradient
from benchmarks.peers.contenders.equations import ETA, rescaled

_NAMESPACE, _ACTOR = "benchmark", "server"


class ParameterServer:
    """θ and each worker's m and s; Ray calls one method at a time. All arrays are float32, shape (P,)."""

    def __init__(self, place: Place) -> None:
        self._theta = np.zeros(place.parameters, np.float32)
        self._moments = [np.zeros(place.parameters, np.float32) for _ in range(place.workers)]
        self._snapshots = [np.zeros(place.parameters, np.float32) for _ in range(place.workers)]

    def ready(self) -> bool:
        return True

    def gem(self, worker: int, gradient: Any) -> Any:
        """Applies the worker's gradient by GEM and returns θ, which Ray copies into its object store."""
        snapshot = self._snapshots[worker]
        self._theta += rescaled(np, self._theta, gradient, self._moments[worker], snapshot)
        np.copyto(snapshot, self._theta)
        return self._theta

    def add(self, worker: int, gradient: Any) -> Any:
        """θ ← θ − η·g."""
        self._theta -= ETA * gradient
        return self._theta


class RayActor(OwnProcess):
    """A Ray actor with Ray's defaults: arguments and results above 100 kB go through its object store in shared memory."""

    requires: ClassVar[str | None] = "ray"
    install: ClassVar[str] = "pip install 'gem-ps[bench]'"
    # m and s in the actor; the gradient in the worker; arguments and results of some round trips in the object store.
    buffers: ClassVar[int] = 9

    @contextmanager
    def server(self, place: Place) -> Iterator[list[int]]:
        _folder(place).mkdir()
        try:
            _token(place).write_text(secrets.token_hex(32))
            with super().server(place) as roots:
                yield roots
        finally:
            rmtree(_folder(place), ignore_errors=True)

    def serve(self, place: Place, ready: Event) -> None:
        ray = _import(place)
        # One CPU, so that Ray does not start a pool of processes for tasks. The actor may still use all CPUs.
        settings = {"num_cpus": 1, "include_dashboard": False, "_temp_dir": str(_folder(place))}
        ray.init(address="local", namespace=_NAMESPACE, logging_level="ERROR", **settings)
        actor = ray.remote(ParameterServer).options(name=_ACTOR).remote(place)
        ray.get(actor.ready.remote())
        ready.set()
        threading.Event().wait()

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        ray = _import(place)
        ray.init(address=place.address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
        commit = getattr(ray.get_actor(_ACTOR), self.rule)
        outgoing = gradient(place, index)

        def round_trip() -> Any:
            return ray.get(commit.remote(index, outgoing))

        yield round_trip


def _folder(place: Place) -> Path:
    """The folder of Ray's sockets and logs. Ray does not remove it."""
    return Path(gettempdir()) / f"ray-{place.port}"


def _token(place: Place) -> Path:
    return _folder(place) / "token"


def _import(place: Place) -> Any:
    """Imports Ray with its port and its authentication set in the environment, which it reads when imported. Otherwise it would
    keep a token in the user's home folder."""
    os.environ["RAY_GCS_SERVER_PORT"] = str(place.port)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token(place))
    import ray

    return ray


RAY = (RayActor("ray-gem", "Ray actor, GEM", "gem", "shm"), RayActor("ray-add", "Ray actor, plain add", "add", "shm"))
