"""Gradients that are encoded on an accelerator: the same bytes as the host's, whatever becomes of each commit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client.conftest import Transport
from client.range_helpers import ranges
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.wire import FeedbackEncoder, wire_format
from gem_client import NonFiniteGradient, Session, connect
from gem_client.torch import Optimizer, device_encoder
from gem_client.torch.device_encoder import DeviceEncoder
from kit.accelerator import TO_DEVICE, TO_HOST, WAITS, Accelerator
from kit.model import Array, Patience, Wire, expire_all, in_background, outcomes, theta, version
from kit.regions import linux_only
from kit.server import DEADLINE, config, serving, wait_until
from torch import nn

PLAIN = Hyperparameters(rule="downpour", learning_rate=0.1)
FORMATS = ["bfloat16", "int8"]
CPU = torch.device("cpu")
SHAPES = [(20, 30), (131,)]  # three blocks, the last one not whole
SPECIAL = [0.0, -0.0, 1e-45, -1e-38, 2.0**-119, 2.0**-119 - 2.0**-143, 3.4e38, -1.0, 127.0, 0.5, 1.5, np.inf]
formats = pytest.mark.parametrize("form", FORMATS)
network_only = pytest.mark.parametrize("transport", ["grpc", "tcp"], indirect=True)


def gradients(size: int, count: int) -> Iterator[Array]:
    """Values of all magnitudes, with blocks of zeros, of next to nothing, of special values and of halfway cases."""
    random = np.random.default_rng(size)
    for number in range(count):
        values = random.standard_normal(size).astype(np.float32) * np.float32(10.0 ** random.integers(-3, 3))
        values[:256] *= np.float32([1, 0, 2.0**-120, 2.0**-140][number % 4])
        if number % 5 == 0:
            largest = np.abs(values).max()
            values = ((random.integers(-126, 126, size) + 0.5) * (float(largest) / 127)).astype(np.float32)
            values[::100] = largest
        if number % 5 == 4:
            places = random.integers(0, size, 3)
            values[places] = random.choice(SPECIAL, 3)
        yield values


def bits(values: Any) -> bytes:
    return np.asarray(values).tobytes()


@formats
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 2_999])
def test_the_bytes_are_the_hosts_and_a_commit_that_was_not_applied_leaves_no_trace(
    size: int, on_cpu: bool, form: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_encoder, "STEP", 600)  # several steps, of two blocks each
    device, parts = CPU if on_cpu else accelerator.device, [slice(0, size // 3), slice(size // 3, size)]
    random, gradient = np.random.default_rng(0), torch.zeros(size).to(device)
    encoder, hosts = DeviceEncoder(wire_format(form), gradient), [wire_format(form).encoder(p.stop - p.start) for p in parts]
    for values in gradients(size, 25):
        encoder.settle()
        gradient.copy_(torch.from_numpy(values))
        update = encoder.update(encoder.encode(parts).cpu().numpy())
        for part, host, sent in zip(parts, hosts, update.parts, strict=True):
            expected = b"".join(map(bytes, host.pieces(values[part])))
            assert b"".join(map(bytes, sent.pieces(empty(0)))) == expected
            if np.isfinite(values).all() and random.random() < 0.7:
                host.applied()
                sent.applied()


class Trainer:
    """A worker's session, whose gradients are given."""

    def __init__(self, session: Session, device: torch.device, shapes: list[Any], **options: Any) -> None:
        self.session, self._step = session, 0
        self._parameters = [nn.Parameter(torch.ones(shape).to(device)) for shape in shapes]
        self.optimizer = Optimizer(self._parameters, session, **options)

    def step(self, bad: bool = False) -> None:
        random = torch.Generator().manual_seed(self._step)
        self._step += 1
        for parameter in self._parameters:
            values = torch.randn(parameter.shape, generator=random)
            parameter.grad = (values * torch.nan if bad else values).to(parameter.device)
        self.optimizer.step()


@contextmanager
def trainer(address: str, device: torch.device, form: str, **settings: Any) -> Iterator[Trainer]:
    with connect(address, gradient_dtype=form, retry=Patience().retry(), **settings) as session:
        yield Trainer(session, device, SHAPES)


@formats
@network_only
def test_a_run_in_which_commits_are_repeated_rejected_and_lost_is_that_of_the_host(
    transport: Transport, form: str, accelerator: Accelerator
) -> None:
    def run(device: torch.device) -> Array:
        with (
            serving(config(PLAIN, lease_seconds=60.0, **transport.settings)) as live,
            Wire(live.address, live) as wire,
            trainer(wire.address, device, form) as worker,
        ):
            worker.step()
            worker.step()
            wire.cut()  # the next is sent twice
            worker.step()
            with pytest.raises(NonFiniteGradient):
                worker.step(bad=True)
            worker.step()
            wire.lose_answers()
            waiting = in_background(worker.step)
            wait_until(lambda: version(live) == 5, "the commit to be applied")
            wire.cut()
            waiting.result(DEADLINE)
            worker.step()
            expire_all(live)
            worker.step()
            assert worker.optimizer.answer is not None
            assert worker.optimizer.answer.lost
            worker.step()
            assert outcomes(live) == {"applied": 7, "repeated": 1, "rejected": 1}
            assert (worker.session._member.links.leader._encoder is None) == (device != CPU)
            return theta(live)

    assert bits(run(accelerator.device)) == bits(run(CPU))


def test_with_overlap_each_commit_gets_the_error_of_the_one_before(accelerator: Accelerator) -> None:
    def run(device: torch.device) -> Array:
        with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8") as session:
            worker = Trainer(session, device, SHAPES, overlap=True)
            for _ in range(5):
                worker.step()
            worker.optimizer.finish()
            return theta(live)

    assert bits(run(accelerator.device)) == bits(run(CPU))


@formats
def test_several_servers_get_their_parts(form: str, accelerator: Accelerator, tmp_path: Path) -> None:
    def run(device: torch.device) -> Array:
        with (
            ranges(tmp_path / device.type, 2, PLAIN) as servers,
            connect(servers.address, gradient_dtype=form, shared_memory=False) as session,
        ):
            worker = Trainer(session, device, [(100, 99), (4001,)])
            for _ in range(4):
                worker.step()
            return session.read()

    assert bits(run(accelerator.device)) == bits(run(CPU))


@formats
def test_a_step_copies_the_bytes_alone_and_waits_once(form: str, accelerator: Accelerator) -> None:
    with serving(config(PLAIN)) as live, trainer(live.address, accelerator.device, form) as worker:
        for _ in range(4):
            worker.step()
        accelerator.counts.clear()
        accelerator.copied.clear()
        worker.optimizer.step()
        assert accelerator.counts == {TO_HOST: 1, TO_DEVICE: 1, WAITS: 1}
        assert accelerator.copied == [wire_format(form).nbytes(731), 4 * 731]


@linux_only
def test_an_update_that_was_encoded_goes_into_memory_that_is_shared_since(accelerator: Accelerator, tmp_path: Path) -> None:
    """And it is exact from the next commit on."""

    def residual(worker: Trainer) -> Array:
        on_devices, encoder = worker.optimizer._tensors._on_devices, worker.session._member.links.leader._encoder
        if on_devices is not None and on_devices._encoder is not None:
            return on_devices._encoder._residual.cpu().numpy()
        assert isinstance(encoder, FeedbackEncoder)
        return encoder._residual

    def run(device: torch.device) -> list[Array]:
        place, away = tmp_path / device.type, tmp_path / "away"
        with serving(config(PLAIN, memory_socket=str(place))) as live:
            os.rename(place, away)
            with trainer(live.address, device, "int8") as worker:
                worker.step()
                worker.session._member.links.drop_streams()
                if device != CPU:
                    os.rename(away, place)
                worker.step()
                assert worker.session.shares_memory == (device != CPU)
                seen = [residual(worker), theta(live)]
                worker.step()
                return [*seen, theta(live)]

    (rest, late, after), (expected_rest, expected, _) = run(accelerator.device), run(CPU)
    assert (bits(rest), bits(late)) == (bits(expected_rest), bits(expected))
    random = torch.Generator().manual_seed(2)
    exact = np.concatenate([torch.randn(shape, generator=random).numpy().ravel() for shape in SHAPES])
    np.testing.assert_array_equal(after, late - np.float32(0.1) * exact)
