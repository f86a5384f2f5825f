"""A checkpoint's state.json: its types, from which its schema follows, and what must hold between its parts.

Its checksum may be right and its content invalid, so it is checked before use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from gem_api.checkpoint import SUMS, require_range
from gem_api.formats import CHECKPOINT
from gem_api.hyperparameters import DECLARATIONS, Hyperparameters, require_valid
from gem_api.layout import Group, Layout
from gem_api.ranges import Range
from gem_api.schedule import Eta
from gem_api.schema import COUNT, REAL, Big, Codec, codec, require

from gem_server.core.leases import Lease
from gem_server.core.shards import LedgerState
from gem_server.core.values import Applied, EndReason, Outcome
from gem_server.durability.journal import LogPosition
from gem_server.rules import PiStatistics
from gem_server.rules.base import Buffers


@dataclass
class LeaseState:
    """A lease, but for its buffers. `spare_version` is None unless its worker overlaps; `answer` is its `last_applied`."""

    lease_id: str
    worker: str
    owner: str
    sequence: int
    base_version: int
    spare_version: int | None
    eta: Eta | None
    progress: float
    reply_progress: float
    spare_progress: float
    answer: Applied | None

    @classmethod
    def of(cls, lease: Lease) -> LeaseState:
        return cls(
            lease.lease_id, lease.worker, lease.owner, lease.sequence, lease.base_version,
            lease.spare_version if lease.overlaps else None,
            lease.eta, lease.progress, lease.reply_progress, lease.spare_progress, lease.last_applied,
        )  # fmt: skip

    def lease(self, expires_at: float, buffers: Buffers) -> Lease:
        """The lease, with these buffers."""
        return Lease(
            self.lease_id, self.worker, expires_at, buffers,
            sequence=self.sequence, last_applied=self.answer, eta=self.eta, base_version=self.base_version,
            progress=self.progress, reply_progress=self.reply_progress, spare_version=self.spare_version or 0,
            spare_progress=self.spare_progress, owner=self.owner,
        )  # fmt: skip


@dataclass
class State:
    """The content of state.json, except for the checksums. `hyperparameters` to `ledger` are the core's.

    Attributes:
        layout: The names and shapes of the whole model's tensors.
        range: The number of the range that the server holds, and how many there are.
        log: Where the log begins that tells what happened afterwards; None if there is no log.
        last: Whether it was written when the server stopped, so that nothing happened afterwards.
    """

    format: str
    server_version: str
    run_id: str
    hyperparameters: Hyperparameters
    layout: list[tuple[str, list[int]]]
    groups: dict[str, Group]
    version: int
    progress: float
    rounds: float
    next_ticket: int
    outcomes: dict[Outcome, int]
    ended: dict[EndReason, int]
    steps_done: dict[str, int]
    samples_committed: Big
    norms: list[float]
    shared: dict[str, float]
    leases: list[LeaseState]
    ledger: LedgerState
    range: tuple[int, int]
    log: LogPosition | None
    last: bool

    @property
    def part(self) -> Range:
        """The part of the model that the checkpoint holds."""
        return Range(*self.range)

    @property
    def whole_layout(self) -> Layout:
        """The whole model's layout. Raises GemError or ValueError if it is invalid."""
        return Layout.of(self.layout, self.groups)


# -- JSON


def encoded(value: Any) -> dict[str, Any]:
    """A part of a state as JSON values, for json's `default`. Of π's histogram it has what a repeated answer shows: the first
    bin, the last, and the sum of those between. With the whole, the state of 1,000 workers would have 5 MB."""
    if not isinstance(value, PiStatistics):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    counts, edges = value.counts, value.edges
    return {
        "counts": [int(counts[0]), int(counts[1:-1].sum()), int(counts[-1])],
        "edges": [float(edges[0]), float(edges[1]), float(edges[-1])],
        "median": float(value.median),
        "tensor_medians": [],
        "proxy_energy": float(value.proxy_energy),
        "central_energy": float(value.central_energy),
    }


def _pi_statistics(pi: dict[str, Any]) -> PiStatistics:
    with np.errstate(over="ignore"):  # of figures that are no float32: they are shown, and nothing rests on them
        arrays = {name: np.array(pi[name], np.float32) for name in ("edges", "tensor_medians")}
    return PiStatistics(**{**pi, **arrays, "counts": np.array(pi["counts"], np.int64)})


_PI = {
    "counts": [COUNT], "edges": [REAL], "median": REAL, "tensor_medians": [REAL], "proxy_energy": REAL, "central_energy": REAL,
}  # fmt: skip
_KNOWN = {PiStatistics: Codec(_PI, _pi_statistics), Hyperparameters: Codec(dict, lambda values: Hyperparameters(**values))}
_CODEC = codec(State, _KNOWN)
_SCHEMA = _CODEC.schema | {"files": SUMS, "sha256": str}

# What format 2 has beside format 1.
_STATE_SINCE_2 = {"progress", "rounds"}
_LEASE_SINCE_2 = {"eta", "progress", "reply_progress", "spare_progress"}
_HYPERPARAMETERS_SINCE_2 = {"smallest_share", "reply_wait"}
_ADDED = {"average"}  # to format 2, after runs were written: a state or a record without it has the default
_SCHEMA_1 = {name: each for name, each in _SCHEMA.items() if name not in _STATE_SINCE_2} | {
    "leases": [{name: each for name, each in _SCHEMA["leases"][0].items() if name not in _LEASE_SINCE_2}]
}


def state_of(values: dict[str, Any], number: int = CHECKPOINT) -> State:
    """The state in the content of a state.json of a format, in the form that this release writes.

    Raises:
        ValueError, GemError: It is invalid in itself, has a name that this release does not know, or has shards that its
            samples do not contain. The message names the part.
    """
    if not 1 <= number <= CHECKPOINT:
        raise ValueError(f"state.format is {str(values.get('format'))[:50]!r}")
    _add_reply_progress(values)
    require(values, _SCHEMA_1 if number == 1 else _SCHEMA, "state")
    require_hyperparameters(values["hyperparameters"], "state.hyperparameters", number)
    state: State = _CODEC.decode(values if number > 1 else _upgraded(values))
    require_range(*state.range)
    _require_progress(state)
    _require_shards(state)
    for lease in state.leases:
        _require_eta(lease.eta)
    state.whole_layout  # noqa: B018 it raises
    return state


def _add_reply_progress(values: Any) -> None:
    """To the leases of a state of format 2 from before they had it: as if no reply had been held."""
    for lease in values.get("leases", []) if isinstance(values, dict) and isinstance(values.get("leases"), list) else []:
        if isinstance(lease, dict) and "progress" in lease:
            lease.setdefault("reply_progress", lease["progress"])


def _require_shards(state: State) -> None:
    """Raises ValueError if the ledger has shards that its samples do not contain, or of a lease that is not there."""
    ledger, most = state.ledger, state.hyperparameters.shard_size
    returned = [shard for deck in ledger.decks for shard in deck[3]]
    for begin, end in [*(shard[1:] for shard in returned), *(shard[4:] for shard in ledger.held)]:
        if not 0 < end - begin <= most or end > ledger.samples:
            raise ValueError(f"state.ledger has a shard [{begin}, {end}) of {ledger.samples} samples, {most} at a time")
    if any(deck[2] > ledger.samples for deck in ledger.decks):
        raise ValueError(f"state.ledger has dealt more than the {ledger.samples} samples that there are")
    if strangers := {shard[0] for shard in ledger.held} - {lease.lease_id for lease in state.leases}:
        raise ValueError(f"state.ledger has shards of a lease that state.leases does not have: {min(strangers)[:50]!r}")


def _require_eta(eta: Eta | None) -> None:
    """Raises ValueError unless it is a learning rate with a schedule's factor, or None."""
    if eta is not None:
        require_valid("learning_rate", eta.rate)
        if not 0 <= eta.factor <= 1:
            raise ValueError(f"state.leases has a schedule's factor of {eta.factor}: it is from 0 to 1")


def _require_progress(state: State) -> None:
    """Raises ValueError unless commits and rounds count at most 1 for each version, and no lease is ahead of the run."""
    counts = [state.progress, state.rounds]
    counts += [each for lease in state.leases for each in (lease.progress, lease.reply_progress, lease.spare_progress)]
    if not (state.progress <= state.version and all(0 <= count <= state.progress for count in counts)):
        raise ValueError(f"state.progress is {state.progress} at version {state.version}, or something is ahead of it")


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """A state of format 1 with what format 2 has beside it. A worker's last η is that of the settings, and all batches are
    whole. The rounds are not known: at most as many as commits, so that no reply of an old run is held."""
    settings = Hyperparameters(**values["hyperparameters"])
    leases = [
        {
            **lease,
            "eta": Eta.at(settings, max(0, lease["answer"]["version"] - 1)) if lease["answer"] else None,
            "progress": lease["base_version"],
            "reply_progress": lease["base_version"],
            "spare_progress": lease["spare_version"] or 0,
        }
        for lease in values["leases"]
    ]
    whole = values["version"]
    return {**values, "hyperparameters": asdict(settings), "leases": leases, "progress": whole, "rounds": whole}


def require_hyperparameters(values: Any, what: str, number: int = CHECKPOINT) -> None:
    """Raises ValueError, naming the hyper-parameter, if one is missing, unknown in a format, or invalid."""
    require(values, dict, what)
    known = DECLARATIONS.keys() - (_HYPERPARAMETERS_SINCE_2 | _ADDED if number == 1 else set())
    if missing := known - _ADDED - values.keys():
        raise ValueError(f"{what} has no {min(missing)!r}")
    if unknown := values.keys() - known:
        raise ValueError(f"{what} has an unknown name, {min(unknown)[:50]!r}")
    try:
        Hyperparameters(**values).require_valid()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
