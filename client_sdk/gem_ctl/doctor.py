"""gem-ctl doctor."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from gem_api.process.kernel_network import FOLDER, KernelSetting, kernel_settings
from gem_api.process.option_types import Number

from gem_ctl.dry_run import FAILS, dry_run, show


# What follows SCRIPT is the script's own.
@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Tries a training script, or checks this machine's kernel.",
)
@click.option("--seconds", envvar="GEM_DOCTOR_SECONDS", type=Number(1), default=300.0, help="Time that the script may take.")
@click.option(
    "--settings",
    envvar="GEM_DOCTOR_SETTINGS",
    default="",
    help="Options of gem-server for the dry run, such as those of your own: '--batch-size 16 --steps 5'.",
    show_default="--steps 3",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(script: Path | None, arguments: tuple[str, ...], seconds: float, settings: str) -> None:
    """Tries a training SCRIPT of PyTorch for three commits, and says what will not work with several workers, and what to do.

    It starts servers that only the script can reach, one for each address that the script names. Your own run sees nothing of
    it. The script runs as it is, and what it writes it writes, but models that it saves. A loop without ShardSampler is stopped
    after them. Exit status 1: something will not work.

    Without SCRIPT, it shows the settings of this machine's kernel that limit its network connections, which to change, and
    why. Run it on the server's machine and on those of workers; it needs no server. What a machine sends depends on its own
    settings: gradients on those of workers, θ on those of the server.

    \b
    Change a setting (as root; in a container with docker run --sysctl):
      sysctl -w NAME="VALUE"                               until the next boot
      echo 'NAME = VALUE' >> /etc/sysctl.d/90-gem.conf     for good

    \b
    Examples:
      gem-ctl doctor
      gem-ctl doctor train.py
      gem-ctl doctor --settings '--batch-size 16' train.py --lr 0.1
    """
    if script is None:
        click.echo(report(FOLDER))
        return
    found = dry_run(script, arguments, settings, seconds)
    show(found)
    sys.exit(int(any(level == FAILS for level, _ in found)))


def report(folder: Path) -> str:
    """The text that the command prints, for the settings in this folder."""
    found = kernel_settings(folder)
    return "\n\n".join(map(_entry, found)) or f"nothing to check: this system shows no settings of the network in {folder}"


def _entry(setting: KernelSetting) -> str:
    advice = f"set it to {setting.advice}" if setting.advice else "good"
    return f"{setting.name} = {setting.value}\n" + click.wrap_text(
        f"{advice}: {setting.why}", 100, initial_indent="    ", subsequent_indent="    "
    )
