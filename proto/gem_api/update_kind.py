"""The kind of a commit, gradient or delta: its name in Python, and its value on the wire."""

from __future__ import annotations

from typing import Literal

from gem_api.errors import InvalidRequest
from gem_api.v1 import training_pb2 as pb

UpdateKind = Literal["gradient", "delta"]
KINDS: dict[UpdateKind, pb.UpdateKind] = {"gradient": pb.UPDATE_KIND_GRADIENT, "delta": pb.UPDATE_KIND_DELTA}
_NAMES = {value: kind for kind, value in KINDS.items()} | {pb.UPDATE_KIND_UNSPECIFIED: "gradient"}


def kind_of(message: pb.UpdateKind) -> UpdateKind:
    """The kind in a message; "gradient" if the field is not set. Raises InvalidRequest if there is no such kind."""
    if (kind := _NAMES.get(message)) is not None:
        return kind
    choices = ", ".join(f"{kind} ({value})" for kind, value in KINDS.items())
    raise InvalidRequest(f"update kind {message} does not exist: send one of {choices}")
