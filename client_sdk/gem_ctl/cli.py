"""gem-ctl: the operator's command line. It shows a run and controls its server."""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

import click
from gem_api import __version__
from gem_api.process.lifetime import interruptible, print_stacks_on_signal
from gem_api.process.message_json import as_dict
from gem_api.process.option_types import Number
from gem_api.process.options import SETTINGS, WithHeadings, command_options, no_false_abort
from gem_api.process.printable import printable
from gem_api.process.progress import say
from gem_client import GemError, Retry, connect
from safetensors.numpy import save

from gem_ctl import output, ranges, text
from gem_ctl.backups.command import checkpoint, restore
from gem_ctl.columns import terminal_width
from gem_ctl.doctor import doctor
from gem_ctl.local_runs import newest_run
from gem_ctl.planning.command import plan_run
from gem_ctl.run_report import is_page, report_on
from gem_ctl.target import Target
from gem_ctl.track.follow import Follower
from gem_ctl.track.tracker import TRACKERS, TrackerError, open_tracker
from gem_ctl.watch import Interrupts, Watch, show

_PLUGINS = "gem_ctl.commands"


class _TypedErrors(WithHeadings, click.Group):
    """Turns the SDK's errors into one line and exit status 1, and Ctrl-C into exit status 130. Includes the commands that other
    installed packages provide, such as those that need the server's code."""

    command_class = WithHeadings

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=_PLUGINS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        plugins = entry_points(group=_PLUGINS, name=cmd_name) if command is None else ()
        return next((_loaded(entry) for entry in plugins), command)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] == "top":
            ctx.fail("there is no command top: use gem-ctl status --watch")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._own_options_first(ctx, args))

    def _own_options_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments with gem-ctl's own options, such as --server, before the command, also if they were given after it."""
        own, begin = _options_of(self), 0
        while begin < len(args) and args[begin].startswith("-"):
            begin += 2 if own.get(args[begin]) else 1
        command = self.get_command(ctx, args[begin]) if begin < len(args) else None
        if command is None:
            return args
        theirs, rest, moved = _options_of(command), list(args[begin + 1 :]), list[str]()
        kept = [args[begin]]
        anywhere = command.context_settings.get("allow_interspersed_args", True)
        while rest and rest[0] != "--" and (anywhere or rest[0].startswith("-")):
            name, equals, _ = rest[0].partition("=")
            takes = 2 if not equals and (own | theirs).get(name) else 1
            if takes > len(rest):
                raise click.BadOptionUsage(name, f"Option {name!r} requires an argument.", ctx)
            (moved if name in own and name not in theirs else kept).extend(rest[:takes])
            del rest[:takes]
        return [*args[:begin], *moved, *kept, *rest]

    @interruptible()
    def invoke(self, ctx: click.Context) -> Any:
        try:
            with no_false_abort():
                return super().invoke(ctx)
        except (GemError, click.ClickException) as error:
            if isinstance(error, click.UsageError):
                raise  # click says how the command is used
            what = text.error(error) if isinstance(error, GemError) else error.format_message()
            click.echo(f"gem-ctl: {printable(what)}", err=True)
            sys.exit(1)

    def main(self, *args: Any, **named: Any) -> Any:
        try:
            return super().main(*args, **named)
        except OSError as error:  # not in `invoke`: help is printed before that
            if error.strerror is None:
                raise
            click.echo(f"gem-ctl: {printable(_what_failed(error))}: {error.strerror}", err=True)
            sys.exit(1)


def _what_failed(error: OSError) -> str:
    return f"can't use {error.filename}" if error.filename else "can't write"


def _options_of(command: click.Command) -> dict[str, bool]:
    """A command's options, without those that every command has, and whether a value follows each."""
    options = [param for param in command.params if isinstance(param, click.Option) and param.name != "version"]
    return {name: not option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)}


def _loaded(entry: EntryPoint) -> click.Command:
    """A command of another package. If that can't be imported, one that says why: it must not take the others with it."""
    try:
        return cast(click.Command, entry.load())
    except Exception as error:  # anything may happen in there
        why = printable(f"{type(error).__name__}: {error}")

        def fail(_: list[str]) -> None:
            raise click.ClickException(f"can't load the command {entry.name}: {why}")

        rest = click.Argument(["_"], nargs=-1, type=click.UNPROCESSED)
        settings = {"ignore_unknown_options": True, "help_option_names": []}
        short = f"Can't be loaded: {type(error).__name__}."
        return click.Command(entry.name, settings, fail, [rest], short_help=short)


@click.group(cls=_TypedErrors, context_settings=SETTINGS)
@command_options("ctl")
@click.version_option(__version__)
@click.pass_context
def main(
    context: click.Context, /, server: str | None, runs: Path, timeout: float, backup_keep: int | None, **options: Any
) -> None:
    """Shows and controls a GEM server.

    \b
    Examples:
      gem-ctl status
      gem-ctl status --server host:50051 --json | jq .version
      gem-ctl status --watch
      gem-ctl pull model.safetensors
      gem-ctl report

    Exit status of every command: 0 on success; 1 if it failed (the server is unreachable, rejects the request or is shutting
    down, a file can't be written, a log is damaged, or Ctrl-C); 2 for wrong usage. Ctrl-C ends status --watch with 0.
    """
    print_stacks_on_signal()
    logging.getLogger("gem_client").addHandler(logging.NullHandler())  # one line of error, not one for each try
    context.obj = Target(server, runs, timeout, options, backup_keep)


@main.command(short_help="Shows the state of the run.")
@click.option(
    "--json",
    "as_json",
    envvar="GEM_STATUS_JSON",
    is_flag=True,
    help="Print one JSON object that always has all fields, for scripts.",
)
@click.option("--watch", envvar="GEM_STATUS_WATCH", is_flag=True, help="Show it every second, until the run is over or Ctrl-C.")
@click.pass_obj
def status(target: Target, as_json: bool, watch: bool) -> None:
    """Shows the state of the run: version, workers, staleness, π, shards, memory.

    If several servers hold a range of the model each, ask the server of range 0: it shows them all.

    --watch redraws it in place; if standard output is no terminal, it prints one after the other.
    """
    if watch and as_json:
        raise click.UsageError("--watch is for people, and --json for scripts: omit one of them")
    with target.admin() as admin, ranges.Peers(target.admin) as peers:
        if watch:
            show(Watch(admin, target.folder), peers, target.server)
            return
        run = admin.status(curves=not as_json)
        others = peers.look(run, target.timeout + 1)
    if as_json:
        several = {"ranges": ranges.as_json(others)} if others else {}
        click.echo(json.dumps(as_dict(run) | several, indent=2, allow_nan=False))
    else:
        click.echo(text.status(run, ranges.lines(target.server, run, others), terminal_width()))


main.add_command(plan_run)
main.add_command(doctor)


@main.command(short_help="Saves the model as a safetensors file.")
@click.argument("out", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--average", is_flag=True, help="Save the average of θ that the run keeps (gem-server --average).")
@click.pass_obj
def pull(target: Target, out: Path, average: bool) -> None:
    """Saves the model (the central variable) to OUT, a safetensors file with the model's own tensor names, all float32.

    OUT may be - for standard output.

    \b
    Examples:
      gem-ctl pull model.safetensors
      gem-ctl --server host:50051 pull - > model.safetensors
    """
    try:
        content, what = _pulled(target, Retry(give_up_after=0), average)  # as the other commands, which ask once
        output.write_and_tell(out, content, what)
    except OSError as error:
        raise click.ClickException(f"can't write {out}: {error}") from error


def _pulled(target: Target, retry: Retry, average: bool = False) -> tuple[bytes, str]:
    """The model, or its average, as a safetensors file, and what it is. Raises GemError."""
    with connect(target.server, timeout=target.timeout, retry=retry, **target.credentials()) as session:
        theta = session.read(average)
        tensors, what = session.layout.split(theta), "the average at version" if average else "version"
        content = save(tensors, metadata={"format": "pt", "gem_version": str(session.read_version)})
        return content, f"{what} {session.read_version}, {len(tensors)} tensors, {theta.size} parameters"


@main.command(short_help="Follows the run into an experiment tracker.")
@click.argument("tracker", type=click.Choice(TRACKERS))
@click.option(
    "--to",
    envvar="GEM_TRACK_TO",
    help="tensorboard: the folder for the runs; mlflow: the tracking URI; wandb: PROJECT or ENTITY/PROJECT.",
    show_default="./tensorboard; MLFLOW_TRACKING_URI; WANDB_PROJECT, else gem",
)
@click.option("--every", envvar="GEM_TRACK_EVERY", type=Number(0.01), default=2.0, help="Seconds between two points.")
@click.pass_obj
def track(target: Target, tracker: str, to: str | None, every: float) -> None:
    """Follows the run into TRACKER, until the run is over: its settings, its metrics by version, and the model at the end.

    The tracker shows the run under its id. If you start tracking late, it logs from then on. If you stop it and start it
    again, it continues the same run there and repeats no point. Ctrl-C ends the tracking, not the run. The tracker's own
    environment variables work too, such as MLFLOW_EXPERIMENT_NAME and WANDB_MODE.

    \b
    Examples:
      gem-ctl track tensorboard
      gem-ctl track mlflow --to http://localhost:5000
      gem-ctl track wandb --to my-team/digits
    """
    with Interrupts() as interrupts, target.admin() as admin:
        try:
            opened = open_tracker(tracker, to)
            retry = Retry(give_up_after=target.timeout)
            follower = Follower(admin, opened, target.folder, lambda path: output.write(path, _pulled(target, retry)[0]), say)
            outcome = follower.follow(every, interrupts)
        except TrackerError as error:
            raise click.ClickException(printable(str(error))) from error
    say("tracking ended; the run goes on" if outcome is None else f"the run is over: {outcome}")


@main.command(short_help="Writes a report of a run: one HTML page with its curves.")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.argument("out", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), required=False)
@click.pass_obj
def report(target: Target, run: Path | None, out: Path | None) -> None:
    """Writes a report of a run to OUT: one self-contained HTML page with curves and, of gem-train, settings. The server need
    not be running.

    RUN is the folder of a run of gem-train, or the file that gem-server --history writes, or the folder with that file. The
    default is the newest run in the folder --runs. Grafana's dashboards show what Prometheus has of a run.

    OUT ends in .html; - is standard output. The default is report.html in the run's folder, or gem-RUN.html.

    \b
    Examples:
      gem-ctl report                              the newest run in ./runs
      gem-ctl report runs/20260131-1200-digits    one run
      gem-ctl report commits.csv report.html      a history of gem-server
    """
    if run is not None and out is None and is_page(run):
        run, out = None, run
    if out is not None and not is_page(out):
        raise click.UsageError(f"a report is a page: give it a name that ends in .html, not {out}")
    folder = run or newest_run(target.runs)
    if folder is None:
        raise click.UsageError(f"there is no run of gem-train in {target.runs}: name a run's folder or a history file")
    path, what, page = report_on(folder, out)
    try:
        output.write_and_tell(path, page.encode(errors="replace"), what)
    except OSError as error:
        raise click.ClickException(f"can't write the report: {error}") from error


@main.command(short_help="Exits with 0 if the server is healthy, else with 1.")
@click.pass_obj
def health(target: Target) -> None:
    """For health checks: exits with 0 if the server is healthy, with 1 if it does not respond or is shutting down."""
    with target.admin() as admin:
        if not admin.healthy():
            raise click.ClickException("the server is shutting down")
    say("serving")


main.add_command(checkpoint)
main.add_command(restore)


@main.command(short_help="Shuts the server down without losing a commit.")
@click.pass_obj
def drain(target: Target) -> None:
    """Shuts the server down: it applies the queued commits, responds to them and exits.

    With --checkpoint-dir, the server writes a checkpoint before it exits.

    The workers wait for the server to come back. Start it again with --resume.
    """
    with target.admin() as admin:
        status = admin.status()
        queued = admin.drain()
    say(f"the server is shutting down; {queued} commits were queued")
    if status.worker_count and text.state(status) != "complete":
        say(
            f"workers still in the run: {status.worker_count}. They wait for the server: start it again, with --resume if it "
            "has a --checkpoint-dir, or stop them"
        )


@main.group(short_help="Lists the quarantined workers, or lets one register again.")
def quarantine() -> None:
    """Lists the quarantined workers, or lets one register again.

    The server puts a worker in quarantine if it rejects too many of its gradients in a row.
    """


@quarantine.command("list")
@click.pass_obj
def list_quarantine(target: Target) -> None:
    """Lists the workers in quarantine, and why they are there."""
    with target.admin() as admin:
        held = admin.quarantine()
    for worker in held:
        name, why = printable(worker.name), printable(worker.why)
        click.echo(f"{name}: {worker.refusals} commits rejected in a row, the last because of {why}")
    if not held:
        click.echo("no worker is in quarantine", err=True)


@quarantine.command("lift")
@click.argument("worker")
@click.pass_obj
def lift_quarantine(target: Target, worker: str) -> None:
    """Lets WORKER register again."""
    with target.admin() as admin:
        admin.lift_quarantine(worker)
    say(f"{printable(worker)} may register again")
