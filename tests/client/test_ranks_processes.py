"""Several ranks that are one worker together, as processes, which torchrun starts or the test itself."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client import rank_loops
from client.rank_loops import UNEVEN
from client.sampler_helpers import ledger
from gem_api.hyperparameters import Hyperparameters
from kit.model import expire_all, outcomes, theta, workers
from kit.ports import free_port
from kit.process import Process
from kit.server import config, serving

pytestmark = pytest.mark.long

EPOCHS = 2
SCRIPT = str(Path(rank_loops.__file__))


def settings(**changes: Any) -> Hyperparameters:
    return Hyperparameters(**{"batch_size": 8, "shard_size": 16, "epochs": EPOCHS, "seed": 3, "learning_rate": 0.05, **changes})


# By a name: the loop, the number of ranks, and the run's settings.
PLAN: dict[str, tuple[str, int, Hyperparameters]] = {
    "sgd": ("sgd", 2, settings()),
    "sgd, 4 ranks": ("sgd", 4, settings()),
    "overlap": ("overlapping", 2, settings()),
    "AdamW on the server": ("adamw_of_server", 2, settings()),
    "AdamW of the worker": ("adamw_of_worker", 2, settings()),
    "AdamW of the worker, 4 ranks, local steps": ("adamw_of_worker", 4, settings(local_steps=3)),
    "local SGD": ("sgd", 2, settings(rule="diloco", local_steps=3, local_momentum=0.9)),
    "accumulation": ("accumulating", 2, settings()),
    "uneven": ("uneven", 4, settings(batch_size=4, shard_size=10)),
    "reading ahead": ("reading_ahead", 2, settings(batch_size=4, shard_size=10)),
    "errors": ("failing", 4, settings()),
}
EQUAL = [name for name, (loop, _, _) in PLAN.items() if loop not in ("uneven", "reading_ahead", "failing")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank has seen, by the plan's names. All loops run in one start of torchrun."""
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(config(run))) for name, (_, _, run) in PLAN.items()}
        plan = [f"{loop} {ranks} {servers[name].address}" for name, (loop, ranks, _) in PLAN.items()]
        torchrun = Process(
            folder / "torchrun",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "4",
            SCRIPT,
            str(folder),
            *plan,
        )
        try:
            assert torchrun.wait() == 0, torchrun.log
        finally:
            torchrun.end()
    of_ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    return {name: [each[place] for each in of_ranks][: PLAN[name][1]] for place, name in enumerate(PLAN)}


@pytest.mark.parametrize("name", EQUAL)
def test_ranks_train_as_one_process_with_their_batches(results: dict[str, Any], name: str) -> None:
    loop, _, run = PLAN[name]
    with serving(config(run)) as live:
        alone = getattr(rank_loops, loop)(live.address, None)
        final = theta(live)
    np.testing.assert_allclose(alone["theta"], final, rtol=1e-6)
    for rank in results[name]:
        np.testing.assert_allclose(rank["theta"], alone["theta"], rtol=2e-4, atol=2e-6)
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert rank["version"] == alone["version"]
        assert rank["epochs"] == alone["epochs"] == [0, 1]
        assert rank["batches"] == alone["batches"]
        assert rank["length"] == alone["length"]
        assert rank["theta"] == results[name][0]["theta"]
    assert Counter(sample for rank in results[name] for sample in rank["seen"]) == Counter(alone["seen"])


def test_one_process_of_all_is_first(results: dict[str, Any]) -> None:
    assert [rank["is_first"] for rank in results["sgd, 4 ranks"]] == [True, False, False, False]


@pytest.mark.parametrize("name", ["uneven", "reading ahead"])
def test_every_sample_is_in_a_batch_of_a_rank(results: dict[str, Any], name: str) -> None:
    ranks = results[name]
    seen = Counter(sample for rank in ranks for sample in rank["seen"])
    assert set(seen) == set(range(UNEVEN))
    assert min(seen.values()) >= EPOCHS
    assert len({rank["batches"] for rank in ranks}) == 1
    assert len({len(rank["seen"]) for rank in ranks}) == 1
    assert all(rank["complete"] for rank in ranks)


def test_all_ranks_raise_what_rank_0_met(results: dict[str, Any]) -> None:
    assert [rank["errors"] for rank in results["errors"]] == 4 * [["", "NonFiniteGradient", "", "LeaseEnded replaced"]]


@pytest.mark.parametrize("killed", [0, 1])
def test_the_worker_ends_if_a_rank_is_killed(tmp_path: Path, killed: int) -> None:
    with serving(config(settings())) as live:
        port = str(free_port())
        ranks = [
            Process(
                tmp_path / str(rank), SCRIPT, str(tmp_path), f"losing 2 {live.address}",
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, KILLED=str(killed),
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            assert [rank.wait() for rank in ranks] == [-9 if rank == killed else 1 for rank in range(2)]
        finally:
            for rank in ranks:
                rank.kill()
        last = ranks[1 - killed].log.strip().rpartition("\n")[2]
        assert "gem_client.TransportError: another rank of this worker has ended" in last
        if killed == 0:
            expire_all(live)
        assert workers(live) == []
        assert ledger(live)["leased"] == 0
        assert outcomes(live) == {"applied": 2}
