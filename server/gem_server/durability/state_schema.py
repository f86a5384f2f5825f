"""The schema of a checkpoint's state. Its checksum may be right and its content invalid, so it is checked before use."""

from __future__ import annotations

from typing import Any

from gem_api.hyperparameters import DECLARATIONS, Hyperparameters
from gem_api.ranges import MAX_RANGES

from gem_server.durability.schema import BIG, COUNT, REAL, Maybe, require

_PI = {
    "counts": [COUNT], "edges": [REAL], "median": REAL, "tensor_medians": [REAL], "proxy_energy": REAL, "central_energy": REAL,
}  # fmt: skip
_ANSWER = {
    "ticket": COUNT, "worker": str, "sequence": COUNT, "version": COUNT, "base_version": COUNT, "staleness": COUNT,
    "loss": Maybe(REAL), "samples": COUNT, "pi": Maybe(_PI), "scale": REAL, "discarded": bool,
}  # fmt: skip
_LEASE = {
    "lease_id": str, "worker": str, "sequence": COUNT, "base_version": COUNT, "answer": Maybe(_ANSWER),
    "owner": str, "spare_version": Maybe(COUNT),
}  # fmt: skip
_LEDGER = {
    "samples": BIG, "completed": COUNT, "samples_completed": BIG, "next_id": COUNT,
    "decks": [(str, COUNT, BIG, [(COUNT, BIG, BIG)])], "held": [(str, COUNT, str, COUNT, BIG, BIG)],
}  # fmt: skip
_STATE = {
    "run_id": str, "hyperparameters": {}, "layout": [(str, [COUNT])],
    "groups": {str: (REAL, bool)}, "version": COUNT, "next_ticket": COUNT,
    "outcomes": {str: COUNT}, "ended": {str: COUNT}, "steps_done": {str: COUNT}, "samples_committed": BIG, "leases": [_LEASE],
    "ledger": _LEDGER, "norms": [REAL], "shared": {str: REAL}, "log": Maybe((COUNT, COUNT)),
    "range": (COUNT, COUNT), "last": bool,
}  # fmt: skip


def require_state(state: Any) -> None:
    """Raises ValueError, naming the part, if a state is invalid in itself, or has shards that its samples do not contain."""
    require(state, _STATE, "state")
    require_hyperparameters(state["hyperparameters"], "state.hyperparameters")
    index, count = state["range"]
    if not index < count <= MAX_RANGES:
        raise ValueError(f"state.range is {index} of {count}: there are 1 to {MAX_RANGES} ranges, from 0")
    ledger, most = state["ledger"], state["hyperparameters"]["shard_size"]
    returned = [shard for deck in ledger["decks"] for shard in deck[3]]
    for begin, end in [*(shard[1:] for shard in returned), *(shard[4:] for shard in ledger["held"])]:
        if not 0 < end - begin <= most or end > ledger["samples"]:
            raise ValueError(f"state.ledger has a shard [{begin}, {end}) of {ledger['samples']} samples, {most} at a time")
    if any(deck[2] > ledger["samples"] for deck in ledger["decks"]):
        raise ValueError(f"state.ledger has dealt more than the {ledger['samples']} samples that there are")
    strangers = {shard[0] for shard in ledger["held"]} - {lease["lease_id"] for lease in state["leases"]}
    if strangers:
        raise ValueError(f"state.ledger has shards of a lease that state.leases does not have: {min(strangers)[:50]!r}")


def require_hyperparameters(values: Any, what: str) -> None:
    """Raises ValueError, naming the hyper-parameter, if one is missing, unknown or invalid."""
    require(values, {}, what)
    if missing := DECLARATIONS.keys() - values.keys():
        raise ValueError(f"{what} has no {min(missing)!r}")
    if unknown := values.keys() - DECLARATIONS.keys():
        raise ValueError(f"{what} has an unknown name, {min(unknown)[:50]!r}")
    try:
        Hyperparameters(**values).require_valid()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
