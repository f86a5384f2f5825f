"""A training run with one poisoning worker: with a bound on norms it converges, without one it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ctl.test_ctl import on
from gem_api.hyperparameters import Hyperparameters
from gem_client import Admin, InvalidRequest, NonFiniteGradient, NormOutOfBounds, Quarantined, Retry, connect
from gem_server.core.norm_bound import MIN_NORMS
from gem_worker.evaluation.evaluate import Evaluator
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.trainer import run_hyperparameters, train
from gem_worker.tasks import Task
from kit.model import GRADIENT, SIZE, in_background, model, theta, version, workers
from kit.process import environment
from kit.regions import abstract
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.settings import configured
from kit.task import LinearDigits
from prometheus_client.registry import CollectorRegistry
from torch import Tensor, nn

POISON = 1e6
HUGE = np.full(SIZE, POISON, np.float32)


class PoisonedDigits(LinearDigits):
    """Its worker's gradients are a million times too large: a loss scale that was never undone."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return POISON * super().loss(model, batch)


def run(live: Live, task: Task, name: str, **settings: Any) -> int:
    """One worker's whole run; returns its commits."""
    with connect(live.address, name=name) as session:
        metrics = WorkerMetrics(CollectorRegistry())
        return train(task, session, run_hyperparameters(live.address, Retry()), metrics, **settings)


def loss_of(live: Live, task: Task) -> float:
    """On held-out data, at the present θ."""
    with connect(live.address) as reader:
        values = reader.pull()
        return Evaluator(task).score(reader.version, reader.layout, values).loss


def poisoned_run(ratio: float, rule: str, shares: bool, overlap: bool = False) -> tuple[Live, float, Exception | None]:
    """An honest worker trains; once there is a history another one poisons, beside it, for as long as it is let.

    Returns the server, stopped; the loss at the end, where guessing gives ln 10 = 2.3; and how it ended for the poisoner.
    """
    torch.manual_seed(0)
    honest, poisoned = LinearDigits(None), PoisonedDigits(None)
    settings = Hyperparameters(rule=rule, steps=120, epochs=0, shards="replicate", batch_size=32, learning_rate=0.05)
    with serving(config(settings, max_norm_ratio=ratio, memory_socket=abstract() if shares else "")) as live:
        training = in_background(lambda: run(live, honest, "ann"))
        wait_until(lambda: version(live) > MIN_NORMS, "a history of norms")
        outcome = in_background(lambda: run(live, poisoned, "eve", overlap=overlap)).exception(DEADLINE)
        if (error := training.exception(DEADLINE)) is not None:
            assert isinstance(error, NonFiniteGradient), error
        assert outcome is None or isinstance(outcome, Exception)
        return live, loss_of(live, honest), outcome


@pytest.mark.parametrize(("rule", "shares", "overlap"), [("gem", True, False), ("downpour", False, True)])
def test_a_poisoned_run_converges_with_a_bound(rule: str, shares: bool, overlap: bool) -> None:
    live, loss, outcome = poisoned_run(100.0, rule, shares, overlap)
    assert isinstance(outcome, Quarantined)
    assert loss < 1.5
    assert live.core.steps_done == {"ann": 120}, "no commit of the poisoner was applied, and none of the honest worker's missed"
    assert live.core.outcomes["rejected"] == 3
    assert live.core.leases.ended == {"quarantined": 1, "left": 1}


def test_the_same_run_is_wrecked_without() -> None:
    live, loss, _ = poisoned_run(0.0, "gem", shares=False)
    assert live.core.steps_done["eve"] > 0
    assert not loss < 2.3


# -- the SDK


def seasoned(live: Live) -> None:
    with connect(live.address, name="ann") as session:
        session.join(model())
        for _ in range(MIN_NORMS):
            session.commit(GRADIENT)


@pytest.mark.parametrize("shares", [False, True], ids=["network", "shared memory"])
def test_a_session_is_told_and_not_resent_and_goes_on(shares: bool) -> None:
    with serving(config(max_norm_ratio=10.0, memory_socket=abstract() if shares else "")) as live:
        seasoned(live)
        with connect(live.address, name="bob") as session:
            session.join(model())
            before = theta(live)
            with pytest.raises(NormOutOfBounds, match="max_norm_ratio"):
                session.commit(HUGE)
            np.testing.assert_array_equal(theta(live), before)
            assert live.on_loop(lambda: live.core.outcomes["rejected"]) == 1
            assert session.commit(GRADIENT).version == MIN_NORMS + 1


def test_a_session_in_quarantine_raises_until_an_operator_lets_it_in() -> None:
    with serving(config(max_norm_ratio=10.0, quarantine_after=2)) as live, Admin(live.address) as admin:
        seasoned(live)
        with connect(live.address, name="eve") as session:
            session.join(model())
            with pytest.raises(NormOutOfBounds):
                session.commit(HUGE)
            for _ in range(3):
                with pytest.raises(Quarantined, match="gem-ctl quarantine lift"):
                    session.commit(GRADIENT if workers(live) == [] else HUGE)
            assert [(held.name, held.refusals) for held in admin.quarantine()] == [("eve", 2)]
            admin.lift_quarantine("eve")
            session.commit(GRADIENT)
            assert session.commit(GRADIENT).lost is False
        with pytest.raises(InvalidRequest):
            admin.lift_quarantine("eve")


# -- the commands


def test_gem_ctl_shows_refusals_lists_and_lifts() -> None:
    with serving(config(max_norm_ratio=10.0, quarantine_after=2)) as live:
        seasoned(live)
        assert (on(live, "quarantine", "list").exit_code, on(live, "quarantine", "list").stdout) == (0, "")
        with connect(live.address, name="eve") as session:
            session.join(model())
            with pytest.raises(NormOutOfBounds):
                session.commit(HUGE)
            header, row = on(live, "status").stdout.splitlines()[-2:]
            assert row.split()[header.replace("median π", "π").split().index("rejected")] == "1"
            with pytest.raises(Quarantined):
                session.commit(HUGE)
        listed = on(live, "quarantine", "list")
        assert listed.exit_code == 0
        assert listed.stdout.startswith("eve: 2 commits rejected in a row, the last because of NormOutOfBounds: ")
        assert listed.stdout.count("\n") == 1
        lifted = on(live, "quarantine", "lift", "eve")
        assert (lifted.exit_code, lifted.stdout) == (0, "eve may register again\n")
        again = on(live, "quarantine", "lift", "eve")
        assert again.exit_code == 1
        assert again.stderr.startswith("gem-ctl: InvalidRequest: no worker 'eve' is in quarantine")


@pytest.mark.long
def test_gem_worker_ends_with_status_4_and_says_why(tmp_path: Path) -> None:
    """It leaves out what is refused, and does not try to come back once it is in quarantine."""
    (tmp_path / "poison.py").write_text(
        "from kit.task import LinearDigits\n"
        "class Task(LinearDigits):\n"
        "    def loss(self, model, batch):\n"
        f"        return {POISON} * super().loss(model, batch)\n"
    )
    settings = Hyperparameters(steps=MIN_NORMS + 1, epochs=0, shards="replicate", batch_size=8)
    with serving(config(settings, max_norm_ratio=100.0)) as live:
        run(live, LinearDigits(None), "ann")
        command = [sys.executable, "-m", "gem_worker", "--task=poison:Task", "--name=eve", configured(log_format="json")]
        for refusals in (2, 0):  # the second time it is not let in at all
            done = subprocess.run(
                [*command, f"--server={live.address}"],
                cwd=tmp_path,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert done.returncode == 4, done.stderr
            lines = [json.loads(line) for line in done.stderr.splitlines()]
            assert [line["event"] for line in lines if line["event"].startswith("batch skipped")] == [
                line["event"] for line in lines if "max_norm_ratio" in line["event"]
            ]
            assert sum(line["event"].startswith("batch skipped") for line in lines) == refusals
            assert lines[-1]["event"].startswith("quarantined")
            assert "gem-ctl quarantine lift" in lines[-1]["why"]
        assert version(live) == MIN_NORMS + 1
