"""The schema of a checkpoint's state. Its checksum may be right and its content invalid, so it is checked before use."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gem_api.checkpoint import SUMS, require_range
from gem_api.formats import CHECKPOINT
from gem_api.hyperparameters import DECLARATIONS, Hyperparameters, require_valid
from gem_api.schedule import Eta
from gem_api.schema import BIG, COUNT, REAL, Maybe, require

from gem_server.core.facts import EndReason, Outcome

_PI = {
    "counts": [COUNT], "edges": [REAL], "median": REAL, "tensor_medians": [REAL], "proxy_energy": REAL, "central_energy": REAL,
}  # fmt: skip
_ANSWER = {
    "ticket": COUNT, "worker": str, "sequence": COUNT, "version": COUNT, "base_version": COUNT, "staleness": COUNT,
    "loss": Maybe(REAL), "samples": COUNT, "pi": Maybe(_PI), "scale": REAL, "discarded": bool,
}  # fmt: skip
_LEASE = {
    "lease_id": str, "worker": str, "sequence": COUNT, "base_version": COUNT, "answer": Maybe(_ANSWER),
    "owner": str, "spare_version": Maybe(COUNT), "eta": Maybe((REAL, REAL)), "progress": REAL, "spare_progress": REAL,
}  # fmt: skip
_LEDGER = {
    "samples": BIG, "completed": COUNT, "samples_completed": BIG, "next_id": COUNT,
    "decks": [(str, COUNT, BIG, [(COUNT, BIG, BIG)])], "held": [(str, COUNT, str, COUNT, BIG, BIG)],
}  # fmt: skip
_STATE = {
    "format": str, "server_version": str, "sha256": str,
    "files": SUMS,
    "run_id": str, "hyperparameters": dict, "layout": [(str, [COUNT])],
    "groups": {str: (REAL, bool)}, "version": COUNT, "progress": REAL, "rounds": REAL, "next_ticket": COUNT,
    "outcomes": {str: COUNT}, "ended": {str: COUNT}, "steps_done": {str: COUNT}, "samples_committed": BIG, "leases": [_LEASE],
    "ledger": _LEDGER, "norms": [REAL], "shared": {str: REAL}, "log": Maybe((COUNT, COUNT)),
    "range": (COUNT, COUNT), "last": bool,
}  # fmt: skip


# What format 2 has beside format 1.
_LEASE_SINCE_2 = {"eta", "progress", "spare_progress"}
_STATE_SINCE_2 = {"progress", "rounds"}
_HYPERPARAMETERS_SINCE_2 = {"smallest_share", "reply_wait"}
_STATE_1 = {name: each for name, each in _STATE.items() if name not in _STATE_SINCE_2} | {
    "leases": [{name: each for name, each in _LEASE.items() if name not in _LEASE_SINCE_2}]
}


def require_state(state: Any, number: int = CHECKPOINT) -> None:
    """Raises ValueError, naming the part, if a state of a format is invalid in itself, has a name that this release does not
    know, or has shards that its samples do not contain."""
    if not 1 <= number <= CHECKPOINT:
        raise ValueError(f"state.format is {str(state.get('format'))[:50]!r}")
    require(state, _STATE_1 if number == 1 else _STATE, "state")
    for part, known in (("outcomes", Outcome), ("ended", EndReason)):
        if unknown := state[part].keys() - set(known):
            raise ValueError(f"state.{part} has an unknown name, {min(unknown)[:50]!r}")
    for lease in state["leases"]:
        _require_eta(lease.get("eta"))
    require_hyperparameters(state["hyperparameters"], "state.hyperparameters", number)
    if number > 1:
        _require_progress(state)
    require_range(*state["range"])
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


def _require_eta(eta: Any) -> None:
    """Raises ValueError unless it is a learning rate with a schedule's factor, or None."""
    if eta is not None:
        require_valid("learning_rate", eta[0])
        if not 0 <= eta[1] <= 1:
            raise ValueError(f"state.leases has a schedule's factor of {eta[1]}: it is from 0 to 1")


def _require_progress(state: dict[str, Any]) -> None:
    """Raises ValueError unless commits and rounds count at most 1 for each version, and no lease is ahead of the run."""
    progress = state["progress"]
    counts = [progress, state["rounds"], *(lease[name] for lease in state["leases"] for name in ("progress", "spare_progress"))]
    if not (progress <= state["version"] and all(0 <= count <= progress for count in counts)):
        raise ValueError(f"state.progress is {progress} at version {state['version']}, or something is ahead of it")


def upgraded(state: dict[str, Any], number: int) -> dict[str, Any]:
    """A state of a lower format in the form that this release writes. In format 1 a worker's last η is that of the settings.
    All batches are whole. The rounds are not known: at most as many as commits, so that no reply of an old run is held."""
    if number > 1:
        return state
    settings = Hyperparameters(**state["hyperparameters"])
    leases = [
        {
            **lease,
            "eta": Eta.at(settings, max(0, lease["answer"]["version"] - 1)) if lease["answer"] else None,
            "progress": float(lease["base_version"]),
            "spare_progress": float(lease["spare_version"] or 0),
        }
        for lease in state["leases"]
    ]
    whole = float(state["version"])
    return {**state, "hyperparameters": asdict(settings), "leases": leases, "progress": whole, "rounds": whole}


def require_hyperparameters(values: Any, what: str, number: int = CHECKPOINT) -> None:
    """Raises ValueError, naming the hyper-parameter, if one is missing, unknown in a format, or invalid."""
    require(values, dict, what)
    known = DECLARATIONS.keys() - (_HYPERPARAMETERS_SINCE_2 if number == 1 else ())
    if missing := known - values.keys():
        raise ValueError(f"{what} has no {min(missing)!r}")
    if unknown := values.keys() - known:
        raise ValueError(f"{what} has an unknown name, {min(unknown)[:50]!r}")
    try:
        Hyperparameters(**values).require_valid()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
