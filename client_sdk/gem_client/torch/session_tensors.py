"""The session's buffers as tensors, one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from gem_api.layout import Vector
from torch import Tensor

from gem_client.session import Session
from gem_client.torch.staging import Staging, on_cuda, receive


class SessionTensors:
    """A flat float32 tensor for each parameter, over its part of the session's buffers; over page-locked memory for CUDA.

    Args:
        session: The session, whose buffers a new lease replaces.
        trained: The trained parameters, by name.

    Attributes:
        gradients: Over the buffer for the next commit.
        thetas: Over θ as last received.
    """

    def __init__(self, session: Session, trained: Mapping[str, Tensor]) -> None:
        self._session = session
        self._parameters = list(trained.values())
        self._bound: Vector | None = None  # the session's θ that the tensors were made over
        self._staging: Staging | None = None
        self.gradients: Sequence[Tensor] = ()
        self.thetas: Sequence[Tensor] = ()

    @property
    def current(self) -> bool:
        """Whether the session still has the buffers that the tensors were made over."""
        return self._bound is self._session.theta

    def bind(self) -> None:
        """Replaces the tensors if the session has other buffers, or the parameters have moved to or from CUDA."""
        staged = on_cuda(self._parameters)
        if not self.current or staged != (self._staging is not None):
            self._bound = self._session.theta
            self._staging = (self._staging or Staging(self._parameters)) if staged else None
            self.gradients = self._staging.gradients if self._staging else self._split(self._session.gradient)
            self.thetas = self._staging.thetas if self._staging else self._split(self._session.theta)

    def written(self) -> Vector:
        """The session's buffer for a commit, with what `gradients` hold."""
        if self._staging is not None:
            self._staging.fetch(self._session.gradient)
        return self._session.gradient

    def load(self) -> None:
        """Copies the received θ into the parameters."""
        self.bind()
        if self._staging is not None:
            self._staging.put(self._session.theta)
        with torch.no_grad():
            for parameter, theta in zip(self._parameters, self.thetas, strict=True):
                receive(theta, parameter)
        if self._staging is not None:
            self._staging.loads_queued()

    def _split(self, packed: Vector) -> list[Tensor]:
        """One tensor per parameter, over its part of a packed buffer. They are not views of one tensor: each is saved alone."""
        ends = accumulate(parameter.numel() for parameter in self._parameters)
        return [torch.from_numpy(packed[end - p.numel() : end]) for p, end in zip(self._parameters, ends, strict=True)]
