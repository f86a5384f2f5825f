"""gem-ctl log: checks a run's log on this machine's disk, and rebuilds past versions from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.option_types import Whole
from gem_api.process.options import SETTINGS
from gem_api.process.printable import printable
from gem_api.ranges import Range
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gem_server.core.records import Kind
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery
from gem_server.durability.segment import DamagedLog, ForeignLog, Segment, name, serials
from gem_server.durability.storage import DISK, write_atomically
from gem_server.rules import require_named

_FOLDER = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group(context_settings=SETTINGS, short_help="Checks a run's log on disk, or rebuilds a past version.")
def main() -> None:
    """Checks a run's log, in the folder of its checkpoints. The server may keep running."""


@main.command(short_help="Reads every record and reports damage.")
@_FOLDER
def verify(folder: Path) -> None:
    """Reads every record in FOLDER/log and reports damage. Exit status 1 if an acknowledged record is missing, or if
    another release wrote a part that this one does not understand."""
    segments = serials(recovery.log_directory(folder))
    if not segments:
        raise click.ClickException(
            f"{folder} has no log: only a run with --durability log has one; give its folder of checkpoints (--checkpoint-dir)"
        )
    damaged, due = False, None
    for path in checkpoint.list_checkpoints(folder):
        try:
            line = _log_position(path)
        except checkpoint.ForeignCheckpoint as error:
            line, damaged = f"NOT READ: {error}", True
        click.echo(f"{path.name}  {printable(line)}")
    for serial in segments:
        path = recovery.log_directory(folder) / name(serial)
        try:
            line, due = _contents(Segment(path), due)
        except (FileNotFoundError, DamagedLog) as error:
            gone = not path.exists()  # retired while it was read, and perhaps overwritten already
            what = "NOT READ" if isinstance(error, ForeignLog) else "DAMAGED"
            line = "removed while it was read: a new checkpoint has made it obsolete" if gone else f"{what}: {error}"
            damaged, due = damaged or not gone, None
        click.echo(f"{path.name}  {printable(line)}")
    if damaged:
        raise SystemExit(1)
    click.echo("whole")


def _log_position(path: Path) -> str:
    """The place where the log continues after a checkpoint. Raises ForeignCheckpoint."""
    try:
        position = checkpoint.read_state(path, files=False).log
    except checkpoint.ForeignCheckpoint:
        raise
    except (OSError, checkpoint.BadCheckpoint) as error:
        return f"can't be read: {error}"
    if position is None:
        return "no log"
    serial, number = position
    return f"log from {name(serial)}, record {number + 1}"


def _contents(segment: Segment, due: int | None) -> tuple[str, int]:
    """A line that describes a segment, and the number of the record that must follow it. Raises DamagedLog."""
    if due is not None and segment.first != due:
        raise DamagedLog(f"{segment.path} begins with record {segment.first}, but record {due} is due")
    last, commits, versions = segment.first - 1, 0, []
    for entry in segment.entries():
        last = entry.number
        if entry.record.kind is Kind.COMMITTED:
            commits += 1
            versions.append(entry.record.fields["version"])
    reach = f", versions {versions[0]} to {versions[-1]}" if versions else ""
    tail = "; ends in an unacknowledged partial record" if segment.torn else ""
    return f"records {segment.first} to {last}, {commits} commits{reach}{tail}", last + 1


@main.command(short_help="Rebuilds the model as it was at a version.")
@_FOLDER
@click.option("--to", "version", type=Whole(0), help="The version to rebuild; the newest if not given.")
@click.option("--rule", help="The run's rule, if it is your own class (module:Class): its code is loaded.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The safetensors file to write the model to."
)
def replay(folder: Path, version: int | None, rule: str | None, out: Path) -> None:
    """Rebuilds the model's parameters at a version, from the checkpoint before it and the log since.

    If FOLDER belongs to one of several servers, the file holds that server's range: a tensor that the range cuts is named
    NAME[first:last], by its elements.
    """
    if out.exists():
        raise click.ClickException(f"{out} exists: name a new file")
    try:
        core = recovery.rebuild(folder, partial(_new_core, rule), version)
    except (ValueError, OSError, DamagedLog, checkpoint.BadCheckpoint) as error:
        raise click.ClickException(printable(str(error))) from None
    layout = core.central.layout
    assert layout is not None
    metadata = {"format": "pt", "gem_version": str(core.central.version), "gem_run_id": core.run_id}
    try:
        scratch = out.with_name(f".{out.name}.tmp")
        with write_atomically(DISK, scratch, out):
            save_file(layout.split(core.central.theta), scratch, metadata)
    except (OSError, SafetensorError) as error:
        raise click.ClickException(f"can't write {out}: {error}") from None
    part = "" if core.part.whole else f", range {core.part}"
    click.echo(f"version {core.central.version} of run {printable(core.run_id)}{part}: {out}")


def _new_core(rule: str | None, run_id: str, settings: Hyperparameters, part: Range) -> Core:
    require_named(settings.rule, rule)
    return Core(run_id, settings, lease_seconds=1.0, memory_limit=0, new_id=str, part=part)
