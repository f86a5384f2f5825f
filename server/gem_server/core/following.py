"""Registration on a server that does not lead: it follows range 0, which gave the worker its lease."""

from __future__ import annotations

from gem_api.errors import InvalidRequest, SettingsDiffer
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import Range

from gem_server.core.facts import LeadsAnswer
from gem_server.core.leases import LeaseTable


def require_shown(part: Range, lead: LeadsAnswer | None) -> None:
    """Raises InvalidRequest unless a worker shows the lead's answer exactly where it must."""
    if lead is None and not part.leads:
        raise InvalidRequest(f"this server holds range {part} of the model: connect to the server of range 0, which leads")
    if lead is not None and part.leads:
        raise InvalidRequest(f"this server leads (range {part}): register without another lead's answer; check --peers")


def require_known_run(lead: LeadsAnswer, run_id: str) -> None:
    """Raises InvalidRequest if the lead's run is not that of the model that this server holds."""
    if lead.run_id != run_id:
        raise InvalidRequest(
            f"this server holds a range of run {run_id}, and the lead belongs to run {lead.run_id}: give all servers the "
            "checkpoint folders of the same run"
        )


def require_same_settings(lead: LeadsAnswer, settings: Hyperparameters) -> None:
    """Raises SettingsDiffer, naming the differences, if the lead has other hyper-parameters."""
    differing = [f"{name} {getattr(lead.settings, name)} there, {own} here" for name, own in vars(settings).items()
                 if own != getattr(lead.settings, name)]  # fmt: skip
    if differing:
        raise SettingsDiffer(
            f"the server of range 0 has other hyper-parameters ({'; '.join(differing)}): give all servers the same options"
        )


def require_usable_id(leases: LeaseTable, lead: LeadsAnswer, worker: str) -> None:
    """Raises LeaseEnded if the lease has ended here, as it must not begin again; InvalidRequest if another worker has it."""
    leases.require_not_ended(lead.lease_id)
    holder = leases.live.get(lead.lease_id)
    if holder is not None and holder.worker != worker:
        raise InvalidRequest("another worker holds a lease of this id: register with the server of range 0 first")
