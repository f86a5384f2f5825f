"""Runs the simulation for a given time, with seeds beyond those of the tests: `python -m simulation.soak` in tests/.

A seed that fails is replayed by `World(seed, folder).run(STEPS)`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import click
from gem_api.process.lifetime import interruptible
from gem_server.durability import segment
from simulation.test_simulation import SEEDS, STEPS
from simulation.world import World


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=float, default=10.0, help="How long.")
@click.option("--first", type=int, default=SEEDS, help="The first seed.")
@click.option("--steps", type=int, default=STEPS, help="Steps of trouble for each seed.")
@interruptible()
def main(minutes: float, first: int, steps: int) -> None:
    """Exits with status 1 if a seed fails."""
    segment._ALLOCATION = 4096  # a simulated disk writes what is allocated
    end, seed, failed, crashes = time.monotonic() + 60 * minutes, first, [], 0
    while time.monotonic() < end:
        folder = Path(tempfile.mkdtemp())
        try:
            world = World(seed, folder)
            world.run(steps)
            crashes += world.crashes
        except Exception as error:
            failed.append(seed)
            click.echo(f"seed {seed}: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(folder)
        seed += 1
    click.echo(f"simulation: seeds {first:,} to {seed - 1:,}, {steps} steps each, {crashes:,} crashes; {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
