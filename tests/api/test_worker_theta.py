"""θ as differences to what a worker holds: both sides keep the same bits, and what is rounded off comes later."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from gem_api.framing import CHUNK_BYTES, ChunkView
from gem_api.layout import Vector
from gem_api.wire import INT8
from gem_api.worker_theta import WorkerTheta

BLOCK = INT8.packing.elements
LARGE = CHUNK_BYTES + 3 * BLOCK + 7  # several pieces, and a block that is not full


def transfer(server: WorkerTheta, worker: WorkerTheta, theta: Vector, sequence: int, is_difference: bool) -> Vector:
    """Sends θ once. Returns what the worker has then."""
    received = np.full(theta.size, np.nan, np.float32)
    assembly, begin = worker.next_format(sequence, is_difference).assembly(received), 0
    for piece in server.next_format(sequence, is_difference).pieces(theta):
        assembly.add(ChunkView(begin, piece.data))
        begin += piece.size
    assembly.require_complete()
    return received


def walk(size: int, steps: int) -> Iterable[Vector]:
    """A θ that moves in steps of very different sizes."""
    random = np.random.default_rng(6)
    theta = random.normal(size=size).astype(np.float32)
    sizes = 10.0 ** random.uniform(-6, 0, size)
    for _ in range(steps):
        yield theta
        theta = (theta + sizes * random.normal(size=size)).astype(np.float32)


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, LARGE])
def test_both_sides_keep_the_same_bits_and_the_worker_computes_on_them(size: int) -> None:
    server, worker = WorkerTheta(size), WorkerTheta(size)
    before = np.zeros(size, np.float32)
    for number, theta in enumerate(walk(size, 5), 1):
        received = transfer(server, worker, theta, number, is_difference=number > 1)
        assert received.tobytes() == worker.theta.tobytes() == server.theta.tobytes()
        assert worker.sequence == server.sequence == number
        largest = np.abs(theta - before).max()
        assert np.abs(received - theta).max() <= (0 if number == 1 else largest / 254 * 1.001 + 1e-6)
        before = received


def test_what_one_difference_rounds_off_is_in_the_next() -> None:
    """An element that moves far less than the largest of its block arrives a little later. Of a θ that rests, all arrives."""
    server, worker = WorkerTheta(BLOCK), WorkerTheta(BLOCK)
    theta = np.zeros(BLOCK, np.float32)
    transfer(server, worker, theta, 1, is_difference=False)
    for number in range(2, 102):
        theta = theta + np.array([1.0] + [1e-4] * (BLOCK - 1), np.float32)
        received = transfer(server, worker, theta, number, is_difference=True)
    np.testing.assert_allclose(received[1:], theta[1:], atol=1 / 254)
    assert received[1] > 0
    for number in range(102, 106):
        received = transfer(server, worker, theta, number, is_difference=True)
    np.testing.assert_allclose(received, theta, rtol=1e-6)


@pytest.mark.parametrize("is_difference", [False, True])
def test_a_transfer_that_breaks_off_leaves_nothing_to_build_on(is_difference: bool) -> None:
    theta = np.ones(LARGE, np.float32)
    server, worker = WorkerTheta(LARGE), WorkerTheta(LARGE)
    transfer(server, worker, theta, 1, is_difference=False)
    piece = next(iter(server.next_format(2, is_difference).pieces(theta)))
    worker.next_format(2, is_difference).assembly(np.empty_like(theta)).add(ChunkView(0, piece.data))
    assert server.sequence == worker.sequence == 0


def test_no_difference_is_too_large_and_none_too_small() -> None:
    largest = np.float32(1e38)
    server, worker = WorkerTheta(4), WorkerTheta(4)
    transfer(server, worker, np.array([-largest, 0, 1, -1], np.float32), 1, is_difference=False)
    for number, value in enumerate([float(largest), 1e-38, 1e-42, 0.0], 2):
        for again in range(8):
            received = transfer(server, worker, np.full(4, value, np.float32), number * 10 + again, is_difference=True)
            assert np.isfinite(received).all()
            assert received.tobytes() == server.theta.tobytes()
        np.testing.assert_allclose(received, value, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("moves", [0.0, 1.0, 1e-38], ids=["nothing", "its block", "less than a scale can say"])
def test_both_sides_keep_the_same_zero(moves: float) -> None:
    """The worker adds +0 to an element that does not move, which makes +0 of -0."""
    server, worker = WorkerTheta(2 * BLOCK), WorkerTheta(2 * BLOCK)
    theta = np.where(np.arange(2 * BLOCK) % 3 == 0, -0.0, 1.0).astype(np.float32)
    for number in range(1, 4):
        transfer(server, worker, theta, number, is_difference=number > 1)
        assert worker.theta.tobytes() == server.theta.tobytes()
        theta[BLOCK + 1] += np.float32(moves)
