"""Checks of a worker that registers, and of a commit's header."""

from __future__ import annotations

from gem_api.errors import InvalidRequest, LayoutMismatch, PermissionDenied, SequenceGap, SettingsDiffer
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import Range, older_than_known
from gem_api.update_kind import UpdateKind

from gem_server.core.leases import Lease, LeaseTable
from gem_server.core.values import Admission, Header, LeaderRegistration
from gem_server.rules import UpdateRule, rule_of
from gem_server.rules.base import require_by_element

MAX_NAME = 128  # characters
MAX_SAMPLES = 1 << 32  # in one commit
MAX_SEQUENCE = (1 << 63) - 1  # a record in the log can hold it
_TO_COMMIT: dict[UpdateKind, str] = {
    "gradient": "the server makes the steps. For an optimizer on each worker, have all workers join with "
    'optimizer="worker", or start the server with --optimizer worker',
    "delta": 'make the steps on the worker, and commit what they have changed, with kind="delta"',
}


def require_valid_name(worker: str) -> None:
    if not 0 < len(worker) <= MAX_NAME or not worker.isprintable():
        raise InvalidRequest(f"a worker name has 1 to {MAX_NAME} printable characters")


def require_same_owner(predecessor: Lease | None, worker: str, owner: str) -> None:
    """Raises PermissionDenied if a worker with other credentials holds the name."""
    if predecessor is not None and predecessor.owner != owner:
        raise PermissionDenied(
            f"{worker!r} is in the run with other credentials: use another name, or wait until that worker has left"
        )


# -- registration on a server that does not lead: it follows range 0, which gave the worker its lease


def require_shown(part: Range, leader: LeaderRegistration | None) -> None:
    """Raises InvalidRequest unless a worker shows the leader's answer exactly where it must."""
    if leader is None and not part.leads:
        raise InvalidRequest(f"this server holds range {part} of the model: connect to the server of range 0, which leads")
    if leader is not None and part.leads:
        raise InvalidRequest(f"this server leads (range {part}): register without another leader's answer; check --peers")


def require_known_run(leader: LeaderRegistration, run_id: str) -> None:
    """Raises InvalidRequest if the leader's run is not that of the model that this server holds."""
    if leader.run_id != run_id:
        raise InvalidRequest(
            f"this server holds a range of run {run_id}, and the leader belongs to run {leader.run_id}: give all servers the "
            "checkpoint folders of the same run"
        )


def require_same_settings(leader: LeaderRegistration, settings: Hyperparameters) -> None:
    """Raises SettingsDiffer, naming the differences, if the leader has other hyper-parameters."""
    differing = [f"{name} {getattr(leader.settings, name)} there, {own} here" for name, own in vars(settings).items()
                 if own != getattr(leader.settings, name)]  # fmt: skip
    if differing:
        raise SettingsDiffer(
            f"the server of range 0 has other hyper-parameters ({'; '.join(differing)}): give all servers the same options"
        )


def require_usable_id(leases: LeaseTable, leader: LeaderRegistration, worker: str) -> None:
    """Raises LeaseEnded if the lease has ended here, as it must not begin again; InvalidRequest if another worker has it."""
    leases.require_not_ended(leader.lease_id)
    holder = leases.live.get(leader.lease_id)
    if holder is not None and holder.worker != worker:
        raise InvalidRequest("another worker holds a lease of this id: register with the server of range 0 first")


# -- commits


def require_layout(layout: Layout | None, fingerprint: bytes) -> None:
    """Raises LayoutMismatch unless the fingerprint is that of the run's layout."""
    if layout is None or fingerprint != layout.fingerprint:
        raise LayoutMismatch("the commit's layout fingerprint is not the run's: register with this model first")


def rule_for_worker(settings: Hyperparameters) -> UpdateRule:
    """The rule of settings that a worker has a part in. Raises InvalidRequest if they are invalid."""
    try:
        settings.require_valid()
        rule = rule_of(settings)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return rule


def require_trainable(rule: UpdateRule, layout: Layout) -> None:
    """Raises InvalidRequest if the rule can't train the layout, or a part of a model."""
    try:
        rule.require_fitting(layout)
        if layout.bounds is not None:
            require_by_element(rule)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def repeated(lease: Lease, sequence: int) -> Admission | None:
    """The decision on a commit that has been received before; None for a new one."""
    if sequence == lease.sequence and lease.last_applied is not None:
        return Admission.REPEATED
    return Admission.QUEUED if sequence == lease.queued else None


def knows_lost_commits(lease: Lease, header: Header, gaps: bool) -> bool:
    """Whether the header shows that the server's restart lost commits that the worker knows to be applied."""
    if not lease.restored:
        return False
    known = {lease.base_version, lease.spare_version} if lease.overlaps else {lease.base_version}
    return header.base_version not in known or (header.sequence > lease.sequence + 1 and not gaps)


def require_not_older(lease: Lease, header: Header) -> None:
    """Raises InvalidRequest if a part of θ is older than the worker knows it.

    A part always has a log, and no version is told before it is on the disk. So no crash can do this, only another folder."""
    known = max(lease.base_version, lease.spare_version) if lease.overlaps else lease.base_version
    if lease.restored and header.base_version > known:
        raise InvalidRequest(older_than_known(header.base_version, known))


def require_due(lease: Lease, sequence: int, gaps: bool) -> None:
    """Raises SequenceGap unless this is the lease's next commit, and none waits in the FIFO.

    With `gaps`, any later commit that the log can hold counts as the next: another range may have applied one that this range
    rejected."""
    if lease.queued is not None:
        raise SequenceGap(f"commit {sequence} of this lease arrived while commit {lease.queued} still waits in the queue")
    if not lease.sequence < sequence <= (MAX_SEQUENCE if gaps else lease.sequence + 1):
        raise SequenceGap(f"commit {sequence} of this lease arrived; expected was {lease.sequence + 1}")


def require_applicable(header: Header, kind: UpdateKind, settings: Hyperparameters, version: int) -> None:
    """Raises InvalidRequest if a rule that takes updates of this kind could not apply the commit at this version."""
    if header.samples > MAX_SAMPLES:
        raise InvalidRequest(f"a commit of {header.samples} samples: at most {MAX_SAMPLES} are allowed")
    if not 0 <= header.share <= 1:  # NaN neither
        raise InvalidRequest(
            f"a commit computed on {header.share:g} of a whole batch: its batch_share is above 0 and at most 1, or 0 for a "
            "whole batch"
        )
    if header.kind != kind:
        raise InvalidRequest(
            f"rule {settings.rule} with {settings.local_steps} local steps takes a {kind}, but this commit holds a "
            f"{header.kind}: {_TO_COMMIT[kind]}"
        )
    if header.base_version > version:
        raise InvalidRequest(f"base version {header.base_version} does not exist: the server is at {version}")
