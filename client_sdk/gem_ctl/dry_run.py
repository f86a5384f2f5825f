"""gem-ctl doctor SCRIPT: tries a training script with a server of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from gem_api.process.lifetime import LAUNCHER
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError
from gem_client.transport.private_servers import FOLDER_VARIABLE, PATIENCE_SECONDS, POLL_SECONDS, addresses, serve

OK, LOOK, FAILS = "ok", "look at this", "will not work"  # as the script's process writes them
_COLOURS = {OK: "green", LOOK: "yellow", FAILS: "red"}


def dry_run(script: Path, arguments: tuple[str, ...], settings: str, seconds: float) -> list[tuple[str, str]]:
    """Runs a script with servers that only it can reach, and returns what was found: a level, and what to do.

    Raises click.ClickException if a server does not start."""
    with TemporaryDirectory(prefix="gem-doctor-", ignore_cleanup_errors=True) as name, ExitStack() as servers:
        folder = Path(name)
        admins = [servers.enter_context(_server(folder, 0, settings))]  # before the script, in case settings are refused

        def start_others() -> None:
            while len(admins) < len(addresses(folder)):
                admins.append(servers.enter_context(_server(folder, len(admins), settings)))

        commits = admins[0].status().hyperparameters.steps
        _run_script([str(script), str(commits), str(seconds), name, *arguments], folder, seconds, start_others)
        runs = list(zip(addresses(folder) or [""], [admin.status() for admin in admins], strict=False))
        found = [(FAILS, "the script's process was killed, or ended by os._exit")]
        if (findings := folder / "findings.json").exists():
            found = [(level, text) for level, text in json.loads(findings.read_text(encoding="utf-8"))]
    return [*_of_servers(runs, commits, any(level == FAILS for level, _ in found)), *found]


def show(found: list[tuple[str, str]]) -> None:
    """Prints what was found, the worst last."""
    for level, text in sorted(found, key=lambda each: list(_COLOURS).index(each[0])):
        width = max(map(len, _COLOURS)) + 2
        lines = click.wrap_text(text, 100, initial_indent=" " * width, subsequent_indent=" " * width)
        click.echo(click.style(level, fg=_COLOURS[level]) + lines[len(level) :])


@contextmanager
def _server(folder: Path, number: int, settings: str) -> Iterator[Admin]:
    """The server for the N-th address that the script names, behind a socket in this folder. It does not outlive a `with`
    block; yields once it serves."""
    address, log, deadline = f"unix:{folder}/{number}", folder / f"{number}.log", time.monotonic() + PATIENCE_SECONDS
    forced = [f"--listen={address}", "--metrics-listen=", f"--checkpoint-dir={folder}/checkpoints-{number}",
              "--durability=memory", "--min-workers=1", "--epochs=0"]  # fmt: skip
    given = [each for each in shlex.split(settings) if each != "--until-stopped"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "gem_server", "--steps=3", *given, *forced], stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, env=environment | {LAUNCHER: str(os.getpid())}, process_group=0,
        )  # fmt: skip
    try:
        with Admin(address) as admin:
            while not _serves(admin):
                if server.poll() is not None or time.monotonic() > deadline:
                    last = (log.read_text(errors="replace").splitlines() or ["it has not served in time"])[-1]
                    why = last.removeprefix("gem-server: ").removeprefix("Error: ")
                    raise click.ClickException(f"the dry run's server does not start: {why}")
                time.sleep(POLL_SECONDS)
            serve(folder, number, address)
            yield admin
    finally:
        server.kill()  # SIGTERM would have it write a checkpoint
        server.wait()


def _serves(admin: Admin) -> bool:
    try:
        return admin.healthy()
    except GemError:
        return False


def _run_script(arguments: list[str], folder: Path, seconds: float, meanwhile: Callable[[], None]) -> None:
    """Runs a script to its end, its output dimmed, and calls `meanwhile` again and again. Its process stops it in time; leaves
    none behind in any case."""
    environment = os.environ | {FOLDER_VARIABLE: str(folder), LAUNCHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "gem_client.torch.dry_run", *arguments]
    click.echo(click.style("", dim=True, reset=False), nl=False)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0)
    try:
        deadline = time.monotonic() + seconds + PATIENCE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            meanwhile()
            time.sleep(POLL_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        click.echo(click.style("", reset=True), nl=False)


def _of_servers(runs: Sequence[tuple[str, pb.GetStatusResponse]], commits: int, failed: bool) -> Iterator[tuple[str, str]]:
    """What the servers saw, each with the address whose place it took; `failed`: the script failed, and may have ended early
    for that reason."""
    most = max(status.version for _, status in runs)
    for address, status in runs:
        where = f" at {address}" if len(runs) > 1 else ""
        if status.version:
            loss = f", loss {status.training_loss:.4g}" if status.HasField("training_loss") else ""
            yield OK, f"{status.version} commits{where}{loss or ': step(loss=loss) shows the loss, too'}"
        elif most and not failed:
            yield LOOK, f"no commit{where}: if that model steps less often, try more: --settings '--steps {10 * commits}'"
        elif status.parameter_count and not failed:
            yield FAILS, f"a worker joined{where}, but made no commit: make every step with the Optimizer's own step()"
        elif not failed:
            yield FAILS, f"no worker joined{where}: open a session with gem_client.connect, and make an Optimizer with it"
        if status.nonfinite_losses:
            yield LOOK, f"{status.nonfinite_losses} losses{where} were NaN or infinite"
    if 0 < most < commits and not failed:
        yield LOOK, f"the loop ended after {most} of {commits} commits, before the run was over"
