"""Commits per second, fairness, latency and server memory at 4, 16 and 100 sessions: `python -m benchmarks.sessions`."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from benchmarks.processes import measure, resident_bytes, server


@click.command()
@click.option("--parameters", type=int, default=156_450, show_default=True, help="P, the size of the model.")
@click.option("--sessions", multiple=True, type=int, default=(4, 16, 100), show_default=True, help="How many at once.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Length of each measurement.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the figures here, as JSON.")
def main(parameters: int, sessions: tuple[int, ...], seconds: float, out: Path | None) -> None:
    """Measures each number of sessions against a fresh server, without model compute."""
    rows = []
    click.echo(f"P = {parameters}, rule gem, {seconds:g} s each\n")
    click.echo("sessions  commits/s  of first  Jain's index   p50 ms   p99 ms  server MiB  MiB a worker")
    for count in sessions:
        with server() as (address, pid):
            empty = resident_bytes(pid)
            load = measure(address, parameters, count, seconds)
            full = resident_bytes(pid)
        p50, p99 = 1e3 * np.percentile(load.latencies, [50, 99])
        rows.append({
            "sessions": count, "commits_per_second": load.rate, "jain": load.jain, "p50_ms": p50, "p99_ms": p99,
            "server_bytes": full, "bytes_per_worker": (full - empty) / count,
        })  # fmt: skip
        click.echo(
            f"{count:8d} {load.rate:10.1f} {load.rate / rows[0]['commits_per_second']:9.2f} {load.jain:13.4f} {p50:8.1f} "
            f"{p99:8.1f} {full / 2**20:11.0f} {(full - empty) / count / 2**20:13.2f}"
        )
    if out:
        out.write_text(json.dumps({"parameters": parameters, "seconds": seconds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
