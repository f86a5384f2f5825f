"""Runs the simulation for a given time, with seeds beyond those of the tests: `python -m simulation.soak` in tests/.

A seed is one of 1 to 3 servers. One that fails is replayed by `World(seed, folder, servers).run(steps)` inside `small()`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import click
from gem_api.process.lifetime import interruptible
from simulation.test_simulation import SEVERAL_STEPS, STEPS
from simulation.world import World, small


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=float, default=10.0, help="How long.")
@click.option("--first", type=int, default=1000, help="The first seed.")
@interruptible()
def main(minutes: float, first: int) -> None:
    """Exits with status 1 if a seed fails."""
    end, seed, failed, crashes = time.monotonic() + 60 * minutes, first, [], 0
    while time.monotonic() < end:
        folder, servers = Path(tempfile.mkdtemp()), (1, 1, 2, 1, 1, 3)[seed % 6]  # several take four times as long
        try:
            with small():
                world = World(seed, folder, servers)
                world.run(STEPS if servers == 1 else SEVERAL_STEPS)
            crashes += world.crashes
        except Exception as error:
            failed.append(seed)
            click.echo(f"seed {seed}, {servers} servers: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(folder)
        seed += 1
    click.echo(f"simulation: seeds {first:,} to {seed - 1:,}, {crashes:,} crashes; {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
