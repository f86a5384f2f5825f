"""What a checkpoint's state must look like before anything is made of it: one that vouches for itself may still be nonsense."""

from __future__ import annotations

from typing import Any

from gem_api.hyperparameters import MAX_VALUES

from gem_server.durability.schema import BIG, COUNT, REAL, Maybe, Optional, Whole, require

_PI = {
    "counts": [COUNT], "edges": [REAL], "median": REAL, "tensor_medians": [REAL], "proxy_energy": REAL, "central_energy": REAL,
}  # fmt: skip
_ANSWER = {
    "ticket": COUNT, "worker": str, "sequence": COUNT, "version": COUNT, "base_version": COUNT, "staleness": COUNT,
    "loss": Maybe(REAL), "samples": COUNT, "pi": Maybe(_PI), "scale": Optional(REAL), "discarded": Optional(bool),
}  # fmt: skip
_LEASE = {
    "lease_id": str, "worker": str, "sequence": COUNT, "base_version": COUNT, "answer": Maybe(_ANSWER),
    "owner": Optional(str), "spare_version": Optional(Maybe(COUNT)),
}  # fmt: skip
_LEDGER = {
    "samples": BIG, "completed": COUNT, "samples_completed": BIG, "next_id": COUNT,
    "decks": [(str, COUNT, BIG, [(COUNT, BIG, BIG)])], "held": [(str, COUNT, str, COUNT, BIG, BIG)],
}  # fmt: skip
SETTINGS = {
    "learning_rate": REAL, "momentum": REAL, "kappa": REAL, "epsilon": REAL, "pi_max": REAL,
    "epochs": Whole(0, MAX_VALUES["epochs"]), "steps": COUNT,
    "seed": COUNT, "batch_size": Whole(1, 1_000_000), "shard_size": Whole(1, 1_000_000),
    "rule_options": Optional(str), "local_steps": Optional(Whole(1, 1_000_000)), "local_momentum": Optional(REAL),
    "weight_decay": Optional(REAL), "schedule": Optional(str), "warmup_versions": Optional(COUNT),
    "decay_versions": Optional(COUNT), "decay_factor": Optional(REAL), "optimizer": Optional(str),
    "optimizer_options": Optional(str),
}  # fmt: skip
_STATE = {
    "run_id": str, "hyperparameters": SETTINGS, "layout": [(str, [COUNT])],
    "groups": Optional({str: (REAL, bool)}), "version": COUNT, "next_ticket": COUNT,
    "outcomes": {str: COUNT}, "ended": {str: COUNT}, "steps_done": {str: COUNT}, "samples_committed": BIG, "leases": [_LEASE],
    "ledger": _LEDGER, "norms": Optional([REAL]), "shared": Optional({str: REAL}), "log": Optional((COUNT, COUNT)),
}  # fmt: skip


def require_state(state: Any) -> None:
    """Raises ValueError, naming the part, where a state is none, or its shards are none of its samples."""
    require(state, _STATE, "state")
    ledger, most = state["ledger"], state["hyperparameters"]["shard_size"]
    returned = [shard for deck in ledger["decks"] for shard in deck[3]]
    for begin, end in [*(shard[1:] for shard in returned), *(shard[4:] for shard in ledger["held"])]:
        if not 0 < end - begin <= most or end > ledger["samples"]:
            raise ValueError(f"state.ledger has a shard [{begin}, {end}) of {ledger['samples']} samples, {most} at a time")
    if any(deck[2] > ledger["samples"] for deck in ledger["decks"]):
        raise ValueError(f"state.ledger has dealt more than the {ledger['samples']} samples that there are")
    strangers = {shard[0] for shard in ledger["held"]} - {lease["lease_id"] for lease in state["leases"]}
    if strangers:
        raise ValueError(f"state.ledger has shards of a lease that is none of state.leases: {min(strangers)[:50]!r}")
