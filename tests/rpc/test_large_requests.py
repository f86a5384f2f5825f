"""Requests that are large on purpose cost no more than their bytes; a large layout or shard keeps no other client waiting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from gem_api import layout as layout_module
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.methods import ADMIN, LARGER_REQUESTS, MAX_REQUEST_BYTES, TRAINING, methods
from gem_api.ranges import Range
from gem_api.v1 import training_pb2 as pb
from gem_server.core.shuffle import shuffled
from gem_server.intake import messages
from gem_server.rpc import training
from kit.raw_client import CHUNK, RPCS, SMALL, Wire, wired
from kit.server import config, serving

ONE_MESSAGE = [method.name for service in (TRAINING, ADMIN) for method in methods(service) if method.parse_request]
LONG = "beta2=0.9 " * (MAX_REQUEST_BYTES // 10 + 1)
BESIDE_THE_LAYOUT: dict[str, dict[str, Any]] = {
    "options": {"optimizer": pb.OptimizerChoice(optimizer="adam", options=LONG)},
    "an optimizer": {"optimizer": pb.OptimizerChoice(optimizer=LONG)},
    "a rule": {"lead": pb.LeadsAnswer(hyperparameters=pb.Hyperparameters(rule=LONG))},
}


def test_a_request_that_is_too_large_is_not_even_parsed(wire: Wire) -> None:
    for rpc in ONE_MESSAGE:
        limit = LARGER_REQUESTS.get(rpc, MAX_REQUEST_BYTES)
        refusal = wire.whole(rpc, b"\xff" * (limit + 1)).refusal()
        assert (refusal.error, f"has {limit + 1} bytes: at most {limit} are" in refusal.details) == ("INVALID_REQUEST", True)


@pytest.mark.parametrize("what", BESIDE_THE_LAYOUT)
def test_what_a_registration_says_beside_its_layout_is_short(what: str, wire: Wire) -> None:
    request = pb.RegisterWorkerRequest(worker_name="x", layout=SMALL.to_message(), **BESIDE_THE_LAYOUT[what])
    refusal = wire.refusal("RegisterWorker", request)
    assert (refusal.error, f"at most {MAX_REQUEST_BYTES} are" in refusal.details) == ("INVALID_REQUEST", True)


@pytest.mark.parametrize("rpc", [name for name, method in RPCS.items() if method.client_streaming])
def test_a_frame_that_is_too_large_is_not_even_parsed(rpc: str, wire: Wire) -> None:
    refusal = wire.whole(rpc, b"\xff" * (CHUNK + MAX_REQUEST_BYTES + 1)).refusal()
    assert (refusal.error, "a frame has" in refusal.details) == ("INVALID_REQUEST", True)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_large_layout_leaves_the_event_loop_free(servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MAX_INLINE_TENSORS", 1, raising=False)
    threads: set[int] = set()

    def noting(convert: Any) -> Any:
        def convert_here(value: Any) -> Any:
            threads.add(threading.get_ident())
            return convert(value)

        return convert_here

    model = Layout.of({"w": (100, 100), "b": (5000,)})
    leader = config(range=Range(0, servers), durability="log", checkpoint_dir=tmp_path, peers=("127.0.0.1:1",) * (servers - 1))
    with serving(leader) as live, wired(live) as wire:
        request = pb.RegisterWorkerRequest(layout=model.to_message())
        for name in ("_from_spec", "_to_spec", "_digested"):
            monkeypatch.setattr(layout_module, name, noting(getattr(layout_module, name)))
        for request.worker_name in ("first", "second"):
            wire.call("RegisterWorker", request)
        assert threads
        assert live.on_loop(threading.get_ident) not in threads


@pytest.mark.parametrize("samples", [1, training.MAX_INLINE_SAMPLES, 3 * messages._PIECE + 1])
def test_a_large_shard_is_shuffled_and_serialised_beside_the_event_loop(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    pieces: list[int] = []
    make = pb.Shard

    def noting_shard(**fields: Any) -> pb.Shard:
        threads.add(threading.get_ident())
        pieces.append(len(fields.get("indices", ())))
        return make(**fields)

    def noting_shuffle(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return shuffled(*arguments)

    with serving(config(Hyperparameters(shard_size=1_000_000))) as live, wired(live) as wire:
        worker = wire.started("worker")
        monkeypatch.setattr(pb, "Shard", noting_shard)
        monkeypatch.setattr("gem_server.core.shards.shuffled", noting_shuffle)
        request = pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=samples)
        shard = wire.call("LeaseShard", request).shard
        assert (live.on_loop(threading.get_ident) in threads) is (samples <= training.MAX_INLINE_SAMPLES)
    assert len(threads) == 1
    assert max(pieces) <= messages._PIECE, "a call of protobuf holds the global lock, also in another thread"
    assert (shard.shard_id, shard.epoch, shard.begin, shard.end) == (1, 0, 0, samples)
    assert list(shard.indices) == shuffled(0, samples, samples, 0, 0, "").tolist()
