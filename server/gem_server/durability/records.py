"""Records as JSON text, as the log holds them, and their schema."""

from __future__ import annotations

import json

from gem_server.core.records import Kind, Record
from gem_server.durability.schema import BIG, COUNT, REAL, Form, Maybe, require
from gem_server.durability.state_form import require_hyperparameters

_FORMS: dict[Kind, Form] = {
    Kind.OPENED: {"lease": str, "worker": str, "overlap": bool, "owner": str},
    Kind.ENDED: {"lease": str, "reason": str},
    Kind.PULLED: {"lease": str, "version": COUNT},
    Kind.COMMITTED: {
        "ticket": COUNT, "lease": str, "sequence": COUNT, "base_version": COUNT, "version": COUNT, "dtype": COUNT,
        "loss": Maybe(REAL), "samples": COUNT, "norm": Maybe(REAL),
    },
    Kind.DEALT: {"lease": str, "samples": BIG, "holding": [BIG]},
    Kind.COMPLETED: {"lease": str, "shard": BIG},
}  # fmt: skip


def to_text(record: Record) -> bytes:
    """A record's kind and fields as JSON."""
    return json.dumps([record.kind, record.fields], separators=(",", ":")).encode()


def from_text(text: bytes | memoryview, payload: memoryview) -> Record:
    """The inverse of `to_text`. Raises ValueError if the text is not a record's."""
    try:
        kind, fields = json.loads(bytes(text))
    except RecursionError:
        raise ValueError("its text is nested too deeply") from None
    if kind == Kind.BEGAN:
        require_hyperparameters(fields, kind)
    else:
        require(fields, _FORMS[Kind(kind)], kind)
    return Record(Kind(kind), fields, (payload,))
