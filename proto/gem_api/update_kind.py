"""What a commit holds, a gradient or a delta: its name in Python, and its value on the wire."""

from __future__ import annotations

from typing import Literal

from gem_api.v1 import training_pb2 as pb

UpdateKind = Literal["gradient", "delta"]
KINDS: dict[UpdateKind, pb.UpdateKind] = {"gradient": pb.UPDATE_KIND_GRADIENT, "delta": pb.UPDATE_KIND_DELTA}


def kind_of(message: pb.UpdateKind) -> UpdateKind:
    """The kind in a message; "gradient" if the field is not set."""
    return "delta" if message == pb.UPDATE_KIND_DELTA else "gradient"
