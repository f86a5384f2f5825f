"""gem-ctl checkpoint and gem-ctl restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import time

import click
from gem_api.process.option_types import Whole
from gem_api.process.options import WithHeadings
from gem_api.process.printable import printable
from gem_api.process.progress import say
from gem_api.ranges import MAX_RANGES, Range

from gem_ctl.backups import backup
from gem_ctl.backups import restore as restoring
from gem_ctl.backups.stores import BackupFailed, open_store
from gem_ctl.target import Target


@click.command(cls=WithHeadings, short_help="Makes the server write a checkpoint now.")
@click.option("--to", envvar="GEM_CHECKPOINT_TO", help="Folder or object store for backups, such as s3://BUCKET/PREFIX.")
@click.pass_obj
def checkpoint(target: Target, to: str | None) -> None:
    """Makes the server write a checkpoint now, and waits until it is written.

    With --to, copies it through the server into a backup, reads the backup back and compares every byte. Training goes on
    meanwhile. A backup that fails leaves nothing. With backup_keep (GEM_BACKUP_KEEP=7), older backups of the run are removed
    afterwards. gem-ctl restore gets a backup back.

    Several servers that hold the model together write one each, and a backup has them all. Range 0 is copied first; the other
    ranges may be some commits ahead of it, and the run continues with the counts of range 0.

    \b
    Examples:
      gem-ctl checkpoint
      gem-ctl checkpoint --to /mnt/backup
      gem-ctl --server host:50051 checkpoint --to s3://bucket/my-run
    """
    with _plain_failures(), ExitStack() as opened:
        store = open_store(to) if to is not None else None
        if store is not None:
            store.files()  # what is wrong with it, before the server writes
        admin = opened.enter_context(target.admin())
        written = admin.checkpoint_all()
        for index, each in enumerate(written):
            of_range = f" of range {index}" if len(written) > 1 else ""
            click.echo(f"checkpoint of version {each.version} in {printable(each.path)} (on the server{of_range})")
        if store is None:
            return
        admins = [admin, *(opened.enter_context(target.admin(address)) for address in admin.status().peers)]
        checkpoints = [
            backup.received(each.path, each.sha256, index if len(written) > 1 else None, one.read_checkpoint(each.path))
            for index, (one, each) in enumerate(zip(admins, written, strict=True))
        ]
        run_id = checkpoints[0].state["run_id"]
        name = backup.next_name(store, run_id, time())
        backup.write(store, name, checkpoints)
        say(f"copied to {printable(f'{store}/{name}')}")
        for old in backup.prune(store, run_id, target.backup_keep) if target.backup_keep else ():
            say(f"removed {printable(f'{store}/{old}')}")


@click.command(cls=WithHeadings, short_help="Gets a backup back, into an empty folder.")
@click.argument("source")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("index", metavar="[RANGE]", type=Whole(0, MAX_RANGES - 1), required=False)
def restore(source: str, folder: Path, index: int | None) -> None:
    """Copies a backup to FOLDER, which must be empty, and compares every byte with what the server wrote. No server is needed.

    SOURCE is what `gem-ctl checkpoint --to` was given: then the newest complete backup there is taken. Or it is one backup.

    FOLDER is the --checkpoint-dir of a server to come. If several servers hold the model together, it gets range-0, range-1,
    ...; with RANGE, it gets that range alone.

    \b
    Examples:
      gem-ctl restore /mnt/backup restored
      gem-ctl restore s3://bucket/my-run/backup-20260131T120000Z-1f2e3d4c restored
      gem-ctl restore s3://bucket/my-run /checkpoints 1
    """
    with _plain_failures():
        done = restoring.restore(open_store(source), folder, index)
    run, version = printable(done.state["run_id"]), done.state["version"]
    say(f"restored run {run} at version {version} from {printable(done.backup)}")
    for of, path in sorted(done.folders.items()):
        part = Range(of, done.state["range"][1])
        which = "" if part.whole else f"--range {part} --durability log "
        peers = " --peers HOST:PORT,..." if part.leads and not part.whole else ""
        click.echo(f"  gem-server {which}--checkpoint-dir {path} --resume{peers}")


@contextmanager
def _plain_failures() -> Iterator[None]:
    """Makes a failed backup one line of error."""
    try:
        yield
    except BackupFailed as error:
        raise click.ClickException(printable(str(error))) from error
