"""Commits the steps of a worker's own optimizer, in any framework whose parameters NumPy can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gem_api.errors import LayoutMismatch, RejectedCommit
from gem_api.layout import Vector

from gem_client.arguments import require_figures
from gem_client.session import Session


class OwnSteps:
    """Joins a run with a model that the worker's own optimizer trains, commits what its steps change, and loads each new θ into
    the parameters.

    One commit covers λ steps, the run's `--local-steps`. If the lease ends between two commits, the steps since the first are
    lost, and the next ones begin on fresh θ. The optimizer's state, such as moments, stays with the worker. A loop::

        own = OwnSteps(session, lambda: {"weight": weight, "bias": bias})
        for batch in batches:
            loss = train(batch)  # a step of the worker's optimizer
            own.step(loss)
        own.load_final()

    Args:
        session: A session that has not joined yet.
        parameters: Returns the parameters by name, in the same order for all workers: arrays, or variables that `numpy.asarray`
            reads. It is called for each commit, so an optimizer may replace them.
        assign: Called as `assign(parameter, value)` to load a value: float32, an array that nothing else uses. The default
            writes into NumPy arrays.

    Raises:
        InvalidRequest: The run has another optimizer, or the session has joined already.
        LayoutMismatch: The run has a model with other names or shapes.
    """

    def __init__(
        self,
        session: Session,
        parameters: Callable[[], Mapping[str, Any]],
        assign: Callable[[Any, Vector], Any] = np.copyto,
    ) -> None:
        self._session, self._parameters, self._assign = session, parameters, assign
        self._losses: list[float] = []
        self._made = 0
        first = {name: np.asarray(parameter) for name, parameter in parameters().items()}
        session.join(first, optimizer="worker", pull_only_reads=True)  # a pull would move what the steps are counted from
        self._load()

    def step(self, loss: Any = None) -> None:
        """Counts a step, and commits every λ-th. Call it after each step of the optimizer.

        Args:
            loss: The loss of the step's batch, a number or an array that holds one. The server records the mean of λ steps.

        Raises:
            NonFiniteGradient: A parameter holds a NaN or an infinity. The parameters hold θ again; the optimizer's state may
                be spoilt.
            NormOutOfBounds: The change exceeds the server's bound. The parameters hold θ again.
            LayoutMismatch: The parameters are not those that the worker joined with.
            TransportError: The server was unreachable for as long as the session's `retry` allows.
        """
        require_figures(loss, None, None, None, None)
        if loss is not None:
            self._losses.append(float(loss))
        self._made += 1
        self._session.add_to_window(1)
        if self._made >= self._session.hyperparameters.local_steps:
            self._commit()

    def finish(self) -> None:
        """Commits the steps since the last commit, if there are any. Raises as `step` does."""
        if self._made:
            self._commit()

    def load_final(self) -> None:
        """Loads the run's final θ: calls `finish`, leaves the run and waits until it is over. Evaluate or save the model after
        this. Raises as `finish` and `Session.pull_final` do."""
        self.finish()
        self._session.pull_final()
        self._load()

    def _commit(self) -> None:
        before = self._session.layout.split(self._session.theta)
        change = {name: np.asarray(parameter) - before.get(name, 0) for name, parameter in self._parameters().items()}
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        try:
            self._session.commit(change, loss=loss, batches=0, kind="delta")  # the window has the batches
        except RejectedCommit as error:
            if not isinstance(error, LayoutMismatch):
                self._load()
            raise
        self._load()

    def _load(self) -> None:
        values = self._session.layout.split(self._session.theta.copy())  # the next commit overwrites the session's own
        for name, parameter in self._parameters().items():
            self._assign(parameter, values[name])
        self._losses.clear()
        self._made = 0
