"""gem-train with rules whose workers make local steps: real processes, down to the summary."""

from __future__ import annotations

import re

import pytest
from kit.settings import configured
from launcher.train_helpers import Launch, read_json

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SELDOM = configured(evaluate_every=1)


def test_an_epoch_is_trained_on_whole_where_windows_do_not_divide_it(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--rule", "agn", "--local-steps", "7", "--epochs", "2", "--batch-size", "32", SELDOM)
    assert launcher.wait() == 0, launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert (summary["rule"], summary["hyperparameters"]["local_steps"], summary["pi_median"]) == ("agn", 7, None)
    assert re.search(r"median π +–\n", launcher.output)
    assert summary["samples"] >= 2 * 1438
    assert summary["leases_ended"].keys() <= {"left"}


def test_workers_that_do_not_fit_the_run_end_it_at_once_and_say_why(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--rule", "agn", "--local-steps", "3", "--overlap", SELDOM)
    assert launcher.wait() == 1
    assert "overlap is not available in this run" in launcher.output
    assert "again" not in launcher.output  # no worker is started a second time
