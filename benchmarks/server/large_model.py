"""A model beyond gRPC's 4 MB and protobuf's 2 GB limits: `python -m benchmarks.server.large_model --parameters 600000000`."""

from __future__ import annotations

import time

import click
import numpy as np
from gem_client import connect

from benchmarks.lib.measuring import measurement
from benchmarks.lib.processes import resident_bytes, server


@measurement(parameters=600_000_000)  # they need about 25 bytes each
@click.option("--commits", type=int, default=3, help="Number of commits.")
def main(parameters: int, commits: int) -> None:
    """Joins, commits and pulls, and checks every element of the θ that comes back."""
    gigabytes = 4 * parameters / 1e9
    click.echo(f"P = {parameters}: {gigabytes:.2f} GB each way")
    with server("downpour") as (address, pid), connect(address, timeout=300) as session:
        began = time.monotonic()
        session.join({"theta": np.zeros(parameters, np.float32)})
        click.echo(f"joined and initialised in {time.monotonic() - began:.1f} s")
        gradient = np.full(parameters, 1.0, np.float32)
        expected = np.float32(0)
        for number in range(1, commits + 1):
            began = time.monotonic()
            answer = session.commit(gradient)
            seconds = time.monotonic() - began
            expected += -np.float32(0.05) * np.float32(1)
            wrong = int(np.count_nonzero(answer.theta != expected))
            click.echo(
                f"commit {number}: {seconds:.1f} s, {2 * gigabytes / seconds:.2f} GB/s both ways, {wrong} wrong elements"
            )
            assert answer.version == number
            assert wrong == 0
        click.echo(f"server resident: {resident_bytes(pid) / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
