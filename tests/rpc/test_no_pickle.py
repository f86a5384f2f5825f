"""No input can run code: the sources use no reader that could, and a pickle sent to every input does nothing."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server.config import StartError
from kit.raw_client import RPCS, Refusal, Wire, Worker, initialize_header, wired
from kit.server import config, serving

ROOT = Path(__file__).parents[2]
SHIPPED = ("proto", "server", "client_sdk", "worker", "deploy")
# Readers that run what they read, and the arrays and models that hide one.
READERS = re.compile(
    r"pickle|marshal|shelve|joblib|\bdill\b|jsonpickle|torch\.(load|save)|np\.(load|save)\b|numpy\.load|\b(eval|exec)\("
    r"|yaml\.(load|unsafe_load|full_load)\(|__reduce|recv_obj|fromfile"
)
RUNS_THE_USERS_SCRIPT = ROOT / "client_sdk/gem_client/torch/dry_run.py"  # it sees what that saves, and loads that alone
# A torch model's mode, and the refusal to be pickled.
HARMLESS = re.compile(r"\.eval\(\)|def __reduce__\(self\) -> NoReturn:|copied or pickled")


def test_no_source_that_is_shipped_names_a_reader_that_runs_code() -> None:
    paths = [path for room in SHIPPED for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts]
    assert len(paths) > 80
    lines = [
        (path.relative_to(ROOT), number, line.strip())
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]
    lines = [found for found in lines if ROOT / found[0] != RUNS_THE_USERS_SCRIPT]
    assert [found for found in lines if READERS.search(HARMLESS.sub("", found[2]))] == []


@pytest.mark.parametrize("line", ["import pickle", "torch.load(f)", "np.load(f)", "eval(text)", "yaml.load(f)"])
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert READERS.search(line)


class Bomb:
    """Whoever loads its pickle makes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def crater(tmp_path: Path) -> Iterator[Path]:
    """What the pickle would leave behind. Nothing may have, at the end of the test."""
    path = tmp_path / "crater"
    yield path
    assert not path.exists()


@pytest.fixture
def bomb(crater: Path) -> bytes:
    """A pickle that works."""
    packed = pickle.dumps(Bomb(crater))
    pickle.loads(packed)
    crater.rmdir()
    return packed + bytes(-len(packed) % 4)


def frames(rpc: str, bomb: bytes, worker: Worker) -> list[list[bytes]]:
    """Calls with a pickle in the place of a message, of a chunk and of a field."""
    calls = [[bomb]]
    chunk = tensors_pb2.Chunk(offset=0, data=bomb)
    if rpc == "Commit":
        calls.append([worker.header(), pb.CommitRequest(chunk=chunk).SerializeToString()])
        calls.append([worker.header(layout_fingerprint=bomb)])
    if rpc == "InitializeCentral":
        calls.append([initialize_header(worker.lease_id), pb.InitializeCentralRequest(chunk=chunk).SerializeToString()])
    return calls


def test_a_pickle_in_any_call_is_refused_and_does_nothing(bomb: bytes, wire: Wire, worker: Worker) -> None:
    for rpc in sorted(set(RPCS) - {"Drain"}):
        for call in frames(rpc, bomb, worker):
            refusal: Refusal = wire.whole(rpc, *call).refusal()
            assert refusal.error, rpc
            assert refusal.status is not grpc.StatusCode.INTERNAL, rpc
    assert worker.commit()[0].version == 1


@pytest.mark.parametrize("name", ["model.safetensors", "workers.safetensors", "state.json"])
def test_a_pickle_in_the_place_of_a_checkpoints_file_is_refused(name: str, bomb: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with serving(config(checkpoint_dir=folder)) as live, wired(live) as wire:
        wire.started("worker").commit()
    (path,) = folder.glob("checkpoint-*")
    (path / name).write_bytes(bomb)
    with pytest.raises(StartError), serving(config(checkpoint_dir=folder, resume=True)):
        pass
