"""Compares grpc.aio with a synchronous thread pool, by a bare echo of P floats on long streams:
`python -m benchmarks.server.grpc_servers`.

Decision 0003 is based on this. Both servers echo a gradient's chunks and compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import click
import grpc

from benchmarks.lib.measuring import measurement
from benchmarks.peers.contenders.base import PROCESSES, Place
from benchmarks.peers.contenders.floors import GRPC_ECHO, GrpcEcho, echo_handler
from benchmarks.peers.harness import measure


class ThreadedEcho(GrpcEcho):
    """The same echo, on gRPC's thread pool."""

    def serve(self, place: Place, ready: Event) -> None:
        def echo(frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
            yield from frames

        server = grpc.server(ThreadPoolExecutor(1200))
        server.add_generic_rpc_handlers([echo_handler(echo)])
        server.add_insecure_port(place.address)
        server.start()
        ready.set()
        server.wait_for_termination()


@measurement(parameters=156_450, seconds=8.0, repeats=3)
@click.option("--streams", multiple=True, type=int, default=(4, 100), help="Numbers of streams, each of a process of its own.")
def main(parameters: int, streams: tuple[int, ...], seconds: float, repeats: int) -> None:
    """Interleaves both servers; prints each round and the ratio."""
    servers, log = (GRPC_ECHO, ThreadedEcho("grpc-threads", "thread pool", "none")), Path(gettempdir()) / "grpc_servers.txt"
    PROCESSES.set_forkserver_preload(["benchmarks.peers.contenders.floors"])
    click.echo("streams  aio echoes/s  threads echoes/s  aio/threads  aio MiB  threads MiB")
    for count in streams:
        for _ in range(repeats):
            aio, threads = (measure(each, parameters, count, seconds, log) for each in servers)
            click.echo(
                f"{count:7d} {aio.rate:13.1f} {threads.rate:17.1f} {aio.rate / threads.rate:12.2f} "
                f"{aio.server_bytes / 2**20:8.0f} {threads.server_bytes / 2**20:12.0f}"
            )


if __name__ == "__main__":
    main()
