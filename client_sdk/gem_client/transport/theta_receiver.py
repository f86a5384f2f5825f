"""The format of the θ that comes with the results of a lease's commits."""

from __future__ import annotations

from gem_api.errors import ServerUnavailable
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, Format, ThetaFormat
from gem_api.worker_theta import WorkerTheta


class ThetaReceiver:
    """Receives a server's θ in the format that the session asks for; as differences, it keeps what the worker holds.

    Args:
        asked: The format. If it can't carry θ whole, θ comes as the difference to what is held, or whole in float32.
        size: The number of elements of θ on that server.
    """

    def __init__(self, asked: Format, size: int) -> None:
        self._asked = asked
        self._held = WorkerTheta(0 if isinstance(asked, ThetaFormat) else size)

    @property
    def base(self) -> int:
        """The commit with whose result came what is held, to which the next θ may be a difference; 0: nothing is held."""
        return self._held.sequence

    def form(self, result: pb.CommitResult) -> ThetaFormat:
        """The format of the θ that comes with a result. Raises ServerUnavailable if it can't be understood."""
        if isinstance(self._asked, ThetaFormat):
            return self._asked
        is_difference = result.theta_dtype == self._asked.dtype
        if (is_difference and not self.base) or (not is_difference and result.theta_dtype != FLOAT32.dtype):
            raise ServerUnavailable("the server sent θ in a format that was not asked for")
        return self._held.next_format(result.sequence, is_difference)


IN_FLOAT32 = ThetaReceiver(FLOAT32, 0)
