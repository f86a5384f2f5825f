"""gem-ctl doctor."""

from __future__ import annotations

from pathlib import Path

import click
from gem_api.process.kernel_network import FOLDER, KernelSetting, kernel_settings


@click.command(short_help="Says what in this machine's kernel slows down the network.")
def doctor() -> None:
    """Shows the settings of this machine's kernel that limit its network connections, which to change, and why.

    Run it on the server's machine and on those of workers; it needs no server. What a machine sends depends on its own
    settings: gradients on those of workers, θ on those of the server.

    \b
    Change a setting (as root; in a container with docker run --sysctl):
      sysctl -w NAME="VALUE"                               until the next boot
      echo 'NAME = VALUE' >> /etc/sysctl.d/90-gem.conf     for good
    """
    click.echo(report(FOLDER))


def report(folder: Path) -> str:
    """The text that the command prints, for the settings in this folder."""
    found = kernel_settings(folder)
    return "\n\n".join(map(_entry, found)) or f"nothing to check: this system shows no settings of the network in {folder}"


def _entry(setting: KernelSetting) -> str:
    advice = f"set it to {setting.advice}" if setting.advice else "good"
    return f"{setting.name} = {setting.value}\n" + click.wrap_text(
        f"{advice}: {setting.why}", 100, initial_indent="    ", subsequent_indent="    "
    )
