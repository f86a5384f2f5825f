"""gem-ctl reshard: cuts a run's checkpoints anew, for another number of servers."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from gem_api.process.option_types import Whole
from gem_api.process.options import SETTINGS
from gem_api.process.printable import printable
from gem_api.ranges import MAX_RANGES, Range

from gem_server.durability import reshard
from gem_server.durability.range_files import BadRanges


@click.command(context_settings=SETTINGS, short_help="Cuts a run's checkpoints anew, for another number of servers.")
@click.argument("source", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--ranges", "count", type=Whole(1, MAX_RANGES), required=True, help="The number of servers to come.")
def main(source: Path, out: Path, count: int) -> None:
    """Cuts the checkpoints IN of a run anew, for another number of servers. It reads files only, and changes nothing in IN.

    IN is the folder with the folders of checkpoints of all servers (range-0, range-1, ...), or the folder of checkpoints of one
    server that holds everything. Shut the servers down with `gem-ctl drain` first, so that they write their last checkpoints.
    Or IN is what `gem-ctl restore` has made of a backup: then the run goes back to it, with the counts of range 0. The other
    ranges may be some commits ahead of it.

    OUT is a new folder. It gets range-0, range-1, ...: the --checkpoint-dir of each new server. With --ranges 1, OUT itself is
    that folder.

    The model, the state of an optimizer that the workers share, the shards and all counters go on. The workers register anew,
    as after a restart of theirs: what the server keeps for each of them (with GEM its momentum) begins at zero, and the shards
    that they were working on are dealt again.

    \b
    Examples:
      gem-ctl reshard runs/a/checkpoints runs/b --ranges 3
      gem-ctl reshard /data/restored /data/new --ranges 2
    """

    def say(line: str) -> None:
        click.echo(printable(line), err=True)

    try:
        reshard.require_new(out)
        reshard.require_outside(source, out)
        resharding = reshard.load(source, count, say)
        _tell_changes(resharding)
        with click.progressbar(length=reshard.nbytes(resharding), label="writing", file=sys.stderr) as bar:
            reshard.write(resharding, out, bar.update)
    except (BadRanges, OSError) as error:
        raise click.ClickException(printable(str(error))) from None
    run, version = printable(resharding.leader.run_id), resharding.leader.version
    parameters = resharding.layout.parameters
    servers = "one server" if count == 1 else f"{count} servers"
    click.echo(f"wrote {out}: run {run} at version {version}, {parameters} parameters for {servers}")
    for index in range(count):
        part = Range(index, count)
        which = "" if part.whole else f"--range {part} --durability log "
        peers = " --peers HOST:PORT,..." if part.leads and not part.whole else ""
        click.echo(f"  gem-server {which}--checkpoint-dir {reshard.folder_of(out, part)} --resume{peers}")


def _tell_changes(resharding: reshard.Resharding) -> None:
    """Says on standard error what does not go on as it was."""
    versions, version = resharding.versions, resharding.leader.version
    if len(set(versions)) > 1:
        click.echo(
            f"the ranges are at versions {', '.join(map(str, versions))}: all go on at {version}, the leader's", err=True
        )
    if resharding.leases:
        shards = f", and {resharding.shards} shards are dealt again" if resharding.shards else ""
        click.echo(f"{resharding.leases} workers must register anew{shards}", err=True)
