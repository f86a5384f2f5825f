"""The client of the GEM parameter server.

    with gem_client.connect("host:50051") as session:
        theta = session.join({"weight": weight, "bias": bias})
        theta = session.commit(gradient, loss=loss).theta

`OwnSteps` commits the steps of your own optimizer, in any framework; `gem_client.torch` has an optimizer and a sampler for
PyTorch loops.
"""

from gem_api.errors import (
    CheckpointFailed,
    DeadlineExceeded,
    Draining,
    GemError,
    IncompleteTransfer,
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    NonFiniteGradient,
    NormOutOfBounds,
    NotInitialized,
    Overloaded,
    PermissionDenied,
    Quarantined,
    RejectedCommit,
    RuleFailed,
    SequenceGap,
    ServerUnavailable,
    SettingsDiffer,
    Superseded,
    TransportError,
    Unauthenticated,
)
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Group, Layout
from gem_api.optimizer_choice import OptimizerChoice

from gem_client.admin import Admin
from gem_client.answer import Answer
from gem_client.connecting import connect
from gem_client.own_steps import OwnSteps
from gem_client.retry import Retry
from gem_client.session import Session

__all__ = [
    "Admin",
    "Answer",
    "CheckpointFailed",
    "DeadlineExceeded",
    "Draining",
    "GemError",
    "Group",
    "Hyperparameters",
    "IncompleteTransfer",
    "InvalidRequest",
    "Layout",
    "LayoutMismatch",
    "LeaseEnded",
    "NonFiniteGradient",
    "NormOutOfBounds",
    "NotInitialized",
    "OptimizerChoice",
    "Overloaded",
    "OwnSteps",
    "PermissionDenied",
    "Quarantined",
    "RejectedCommit",
    "Retry",
    "RuleFailed",
    "SequenceGap",
    "ServerUnavailable",
    "Session",
    "SettingsDiffer",
    "Superseded",
    "TransportError",
    "Unauthenticated",
    "connect",
]

for _public in [value for name, value in globals().items() if name in __all__ and isinstance(value, type)]:
    if issubclass(_public, GemError):
        _public.__module__ = __name__  # a traceback names an error as users import it
