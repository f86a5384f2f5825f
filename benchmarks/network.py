"""Measures commits over a link between two machines: `python -m benchmarks.network`. It needs Linux and root, not two machines.

The server is in this machine's network, the clients are in a namespace of their own behind a wire in user space.
The same wire carries `iperf3 --bidir` for comparison, if that program is installed.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from gem_api.wire import WIRE_FORMATS

from benchmarks.lib import wire
from benchmarks.lib.measuring import heads, interleaved, measurement, medians
from benchmarks.lib.page import row, table
from benchmarks.lib.processes import measure, server
from benchmarks.lib.results import write_json

_FIGURES = ("rate", "up", "down", "p50", "p99")
_HEADS = ("parameters", "workers", "rtt ms", "gradients/θ", *heads(_FIGURES), "iperf3 --bidir, Mbit/s")


@dataclass(frozen=True)
class Kind:
    """What is measured: P, the number of workers, the round trip in seconds, and the formats of gradients and θ."""

    parameters: int
    workers: int
    rtt: float
    gradient: str
    theta: str

    def bits(self, form: str) -> int:
        """The bits of a vector in a format."""
        return 8 * WIRE_FORMATS[form].nbytes(self.parameters)


@dataclass(frozen=True)
class Carried:
    """A measurement; `plain` is what iperf3 gets, up and down, in bits per second, if it is installed."""

    rate: float
    up: float  # bits per second, as `down`
    down: float
    p50: float
    p99: float
    plain: tuple[float, float] | None


@measurement(
    parameters=(1_000_000, 25_000_000), workers=(2, 4, 16), seconds=20.0, repeats=3, out=Path("runs/throughput/network.json")
)
@click.option("--bandwidth", type=float, default=1000.0, help="Mbit/s, in each direction.")
@click.option(
    "--rtt", type=float, multiple=True, default=(0.0, 20.0), help="Milliseconds from a worker to the server and back."
)
@click.option("--gradient-dtype", type=click.Choice(list(WIRE_FORMATS)), default="float32", help="Format of gradients.")
@click.option("--theta-dtype", type=click.Choice(list(WIRE_FORMATS)), default="float32", help="Format of θ.")
def main(
    parameters: tuple[int, ...], workers: tuple[int, ...], seconds: float, repeats: int, out: Path, bandwidth: float,
    rtt: tuple[float, ...], gradient_dtype: str, theta_dtype: str,
) -> None:  # fmt: skip
    """Measures every combination against a fresh server, without model compute; medians of the repeats."""
    if not wire.possible():
        raise click.ClickException("this needs Linux, root, /dev/net/tun, and the programs ip and unshare")
    kinds = [
        Kind(size, count, each / 1000, gradient_dtype, theta_dtype) for each in rtt for size in parameters for count in workers
    ]
    measured = interleaved(kinds, repeats, partial(_measure, bandwidth * 1e6, seconds))
    click.echo(table(_HEADS, (_cells(kind, carried) for kind, carried in measured.items())))
    write_json(out, [vars(kind) | vars(one) for kind, several in measured.items() for one in several])


def _measure(bandwidth: float, seconds: float, kind: Kind) -> Carried:
    with _wire(bandwidth, kind.rtt / 2) as folder:
        plain = _plain(folder, min(seconds, 5.0))
        with server(host=wire.NEAR) as (address, _):
            load = measure(
                address, kind.parameters, kind.workers, seconds, False, enter=partial(wire.enter, folder),
                gradient_dtype=kind.gradient, theta_dtype=kind.theta,
            )  # fmt: skip
    up, down = (load.rate * kind.bits(form) for form in (kind.gradient, kind.theta))
    carried = Carried(load.rate, up, down, load.p50, load.p99, plain)
    click.echo(row(_cells(kind, [carried])), err=True)
    return carried


@contextmanager
def _wire(bandwidth: float, delay: float) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        carrier = mp.get_context("spawn").Process(target=wire.run, args=(folder, bandwidth, delay), daemon=True)
        carrier.start()
        try:
            while not wire.is_up(folder):
                if not carrier.is_alive():
                    raise click.ClickException("the wire has ended: see its error above")
                time.sleep(0.05)
            yield folder
        finally:
            carrier.kill()
            carrier.join()


def _plain(folder: Path, seconds: float) -> tuple[float, float] | None:
    """What `iperf3 --bidir` gets on the wire, up and down, in bits per second; None without that program."""
    if shutil.which("iperf3") is None:
        return None
    listening = subprocess.Popen(["iperf3", "-s", "-1", "-B", wire.NEAR], stdout=subprocess.DEVNULL)
    try:
        with mp.get_context("spawn").Pool(1) as far:
            return far.apply(_iperf, (folder, seconds))
    finally:
        listening.kill()
        listening.wait()


def _iperf(folder: Path, seconds: float) -> tuple[float, float]:
    wire.enter(folder)
    command = ["iperf3", "-c", wire.NEAR, "--bidir", "-J", "-t", f"{seconds:g}"]
    for _ in range(20):  # until the other end listens
        ended = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        if "error" not in ended:
            up, down = (ended["end"][f"sum_received{way}"]["bits_per_second"] for way in ("", "_bidir_reverse"))
            return float(up), float(down)
        time.sleep(0.1)
    raise click.ClickException(f"iperf3: {ended['error']}")


def _cells(kind: Kind, measured: list[Carried]) -> list[object]:
    plain = next((f"{one.plain[0] / 1e6:.0f} / {one.plain[1] / 1e6:.0f}" for one in measured if one.plain), "not installed")
    form = f"{kind.gradient}/{kind.theta}"
    return [f"{kind.parameters:,}", kind.workers, f"{1000 * kind.rtt:g}", form, *medians(measured, _FIGURES), plain]


if __name__ == "__main__":
    main()
