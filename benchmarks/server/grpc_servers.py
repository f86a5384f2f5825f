"""Compares grpc.aio with a synchronous thread pool, by a bare echo of P floats on long streams:
`python -m benchmarks.server.grpc_servers`.

Decision 0003 is based on this. Both servers echo a gradient's chunks and compute nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from typing import Any

import click
import grpc
import numpy as np
from gem_api.framing import chunk_frames
from gem_worker.launcher.cluster import free_port

from benchmarks.lib.measuring import measurement
from benchmarks.lib.processes import CLIENT_PROCESSES, resident_bytes

_PATH = "/benchmark.Echo/Echo"


def _handlers(echo: Any) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler("benchmark.Echo", {"Echo": grpc.stream_stream_rpc_method_handler(echo)})


def serve_aio(port: int) -> None:
    async def echo(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for frame in frames:
            yield frame

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([_handlers(echo)])
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def serve_threads(port: int) -> None:
    def echo(frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from frames

    server = grpc.server(ThreadPoolExecutor(1200))
    server.add_generic_rpc_handlers([_handlers(echo)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def _streams(port: int, parameters: int, streams: int, seconds: float, ready: Any, results: Any) -> None:
    channels = [
        grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(streams)
    ]
    counts, go, opened = [0] * streams, threading.Event(), threading.Barrier(streams + 1)
    payload = np.ones(parameters, np.float32)

    def work(index: int) -> None:
        grpc.channel_ready_future(channels[index]).result(60)
        outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        call = channels[index].stream_stream(_PATH)(chain.from_iterable(iter(outgoing.get, None)))
        frames = len(list(chunk_frames(payload)))

        def round_trip() -> None:
            outgoing.put(chunk_frames(payload))
            for _ in range(frames):
                next(call)

        round_trip()
        opened.wait()
        go.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            round_trip()
            counts[index] += 1
        outgoing.put(None)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(streams)]
    for thread in threads:
        thread.start()
    opened.wait()
    ready.wait()
    go.set()
    for thread in threads:
        thread.join()
    results.put(sum(counts))


@measurement(parameters=156_450, seconds=8.0, repeats=3)
@click.option("--streams", multiple=True, type=int, default=(4, 100), help="Numbers of streams.")
def main(parameters: int, streams: tuple[int, ...], seconds: float, repeats: int) -> None:
    """Interleaves both servers; prints each round and the ratio."""
    context = mp.get_context("spawn")
    click.echo("streams  aio echoes/s  threads echoes/s  aio/threads  aio MiB  threads MiB")
    for count in streams:
        for _ in range(repeats):
            aio, threads = (_round(context, serve, parameters, count, seconds) for serve in (serve_aio, serve_threads))
            click.echo(
                f"{count:7d} {aio[0]:13.1f} {threads[0]:17.1f} {aio[0] / threads[0]:12.2f} {aio[1] / 2**20:8.0f} "
                f"{threads[1] / 2**20:12.0f}"
            )


def _round(context: Any, serve: Any, parameters: int, streams: int, seconds: float) -> tuple[float, int]:
    port = free_port()
    server = context.Process(target=serve, args=(port,), daemon=True)
    server.start()
    each, results, ready = max(1, streams // CLIENT_PROCESSES), context.Queue(), context.Barrier(CLIENT_PROCESSES + 1)
    clients = [
        context.Process(target=_streams, args=(port, parameters, each, seconds, ready, results))
        for _ in range(CLIENT_PROCESSES)
    ]
    for client in clients:
        client.start()
    ready.wait()
    total = sum(results.get() for _ in clients)
    memory = resident_bytes(server.pid)
    for process in (*clients, server):
        process.terminate()
        process.join()
    return total / seconds, memory


if __name__ == "__main__":
    main()
