"""gem-train with rules whose workers make local steps: real processes, down to the summary."""

from __future__ import annotations

import re

import pytest
import safetensors.torch
from gem_worker.tasks.convnet import ConvNet
from kit.settings import configured
from launcher.train_helpers import Launch, read_json

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SELDOM = configured(evaluate_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [("agn",), ("diloco:delay=2", "--schedule", "constant:warmup=10")], ids=["agn", "diloco"])
def test_gem_train_learns_the_digits_with_local_steps(launch: Launch, rule: tuple[str, ...]) -> None:
    run = ("--epochs", "0", "--steps", "60", "--shards", "replicate")
    launcher = launch("--workers", "2", "--local-steps", "4", *run, SELDOM, "--rule", *rule)
    assert launcher.wait() == 0, launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert (summary["outcome"], summary["rule"], summary["commits"]) == ("complete", rule[0].partition(":")[0], 120)
    assert summary["hyperparameters"]["local_steps"] == 4
    assert summary["samples"] > 120 * 3 * 64  # of each commit those of all its batches; a shard's last is smaller
    assert summary["pi_median"] is None
    assert summary["test_accuracy"] > 0.5
    assert re.search(r"median π +–\n", launcher.output)
    assert (launcher.folder / "report.html").stat().st_size > 20_000
    ConvNet().load_state_dict(safetensors.torch.load_file(launcher.folder / "model.safetensors"))


def test_an_epoch_is_trained_on_whole_where_windows_do_not_divide_it(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--rule", "agn", "--local-steps", "7", "--epochs", "2", "--batch-size", "32", SELDOM)
    assert launcher.wait() == 0, launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert summary["samples"] >= 2 * 1438
    assert summary["leases_ended"].keys() <= {"left"}


def test_workers_that_do_not_fit_the_run_end_it_at_once_and_say_why(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--rule", "agn", "--local-steps", "3", "--overlap", SELDOM)
    assert launcher.wait() == 1
    assert "overlap is not available in this run" in launcher.output
    assert "again" not in launcher.output  # no worker is started a second time
