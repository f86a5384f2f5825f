"""Whole trainings with real processes: what is made of a run, and one race to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.named_settings import parse
from gem_api.schedule import factor

from benchmarks.finals import plan, real
from benchmarks.finals.apart import cosine
from benchmarks.finals.page import Losses, differences, interval, verdict, write_page
from benchmarks.finals.runs import Outcome, Run, stored


def test_rounds_have_the_team_of_the_simulation_and_its_number_of_rounds() -> None:
    proportion = real.race_of(Run("transformer", "mixed", 8, 0, 200, real.ROUNDS, "rate=0.02 team=proportion"))
    assert proportion["sizes"] == [16] * 4 + [5] * 4
    assert proportion["schedule"] == pytest.approx(300 / 1.06, rel=0.03)
    fast = real.race_of(Run("transformer", "straggler", 8, 0, 200, real.ROUNDS, "rate=0.02 team=fast"))
    assert fast["sizes"] == [16] * 7 + [0]
    assert real.race_of(Run("transformer", "noisy", 8, 0, 200, real.ROUNDS, "rate=0.02 team=backup first=6"))["first"] == 6


def test_this_server_gets_the_settings_and_the_commits_that_the_clock_foretells() -> None:
    alone = real.race_of(Run("transformer", "mixed", 8, 0, 200, real.OURS, plan.ours(plan.GROWTH)))
    assert alone["schedule"] == pytest.approx(0.95 * 1600, rel=0.04)
    assert (alone["settings"]["smallest_share"], alone["settings"]["reply_wait"]) == (1, 0)
    both = real.race_of(Run("transformer", "mixed", 8, 0, 200, real.OURS, plan.ours(plan.BOTH)))
    assert (both["settings"]["smallest_share"], both["settings"]["reply_wait"]) == (0.0625, 0.15)


def test_this_server_has_the_schedule_of_the_rounds_and_of_the_simulation() -> None:
    """Down to 0: the server's own cosine would end at a tenth of the rate."""
    race = real.race_of(Run("transformer", "mixed", 8, 0, 200, real.OURS, plan.ours(plan.BOTH)))
    given = Hyperparameters(**parse("schedule", race["settings"]["schedule"]))
    for done in range(0, 1600, 10):
        assert factor(given, done) == pytest.approx(cosine(done, race["schedule"]), abs=0.04)


def test_rounds_take_the_rate_that_was_best_in_the_simulation() -> None:
    tried = {
        Run("transformer", "mixed", 8, 0, 200, "rounds", f"rate={rate} team=fast"): Outcome(loss, None, 300, 1600, 300)
        for rate, loss in ((0.01, 2.1), (0.02, 2.0))
    }
    same = [run for run in real.runs(tried) if (run.model, run.profile, run.workers) == ("transformer", "mixed", 8)]
    rates = {run.settings for run in same if "fast" in run.settings}
    assert rates == {"rate=0.02 team=fast"}


def test_the_page_shows_real_runs_beside_simulated_ones(tmp_path: Path) -> None:
    store = stored(tmp_path / "finals.json")
    for method, loss, used in (("ours", 2.0, 1600), ("real ours", 2.1, 1520)):
        run = Run("transformer", "mixed", 8, 0, 200, method, plan.ours(plan.BOTH))
        store.add(run, Outcome(loss, None, 300, used, 1600, ((0.0, 4.0), (150.0, 2.25), (300.0, loss))))
    ddp = Run("transformer", "mixed", 8, 0, 200, "real rounds", "rate=0.015")
    store.add(ddp, Outcome(2.3, None, 300, 700, 88, ((300.0, 2.3),)))
    store.add(replace(ddp, settings="rate=0.015 team=fast"), Outcome(2.2, None, 300, 700, 150, ((300.0, 2.2),)))
    written = write_page(stored(tmp_path / "finals.json"), tmp_path).read_text()
    assert "| mixed | 2.000 | |" in written, "simulated"
    assert "| transformer, 8 | mixed | 2.100 | 2.300 | 2.200 fast | |" in written


def test_a_difference_counts_if_its_interval_is_on_one_side_of_0(tmp_path: Path) -> None:
    """Of three seeds: Student's t with two degrees of freedom is 4.303."""
    assert interval([0.0, 0.1, 0.2]) == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert [verdict(found) for found in ([-0.2, -0.1, -0.15], [0.2, 0.1, 0.15], [-0.3, -0.1, 0.0])] == [
        "lower",
        "higher",
        "level",
    ]
    store = stored(tmp_path / "finals.json")
    for seed in (0, 1):
        ours = Run("transformer", "mixed", 8, seed, 200, "real ours", plan.ours(plan.BOTH))
        store.add(ours, Outcome(2.1 + 0.01 * seed, None, 300, 1600, 1600))
        for team, loss in (("", 2.5), (" team=proportion", 2.2)):
            store.add(replace(ours, method="real rounds", settings=f"rate=0.015{team}"), Outcome(loss, None, 300, 700, 88))
    assert differences(Losses(store), ("transformer", "mixed", 8, 200), kind="real ") == pytest.approx([-0.1, -0.09])


def test_of_two_lengths_of_the_schedule_the_better_mean_counts() -> None:
    where, rate = ("transformer", "mixed", 8, 200), "rate=0.015"
    results = {
        Run("transformer", "mixed", 8, seed, 200, f"{length} rounds", rate): Outcome(loss, None, 300, 700, 88)
        for length, losses in (("real", (2.0, 2.3)), ("cut", (2.2, 2.0)))
        for seed, loss in enumerate(losses)
    }
    assert Losses(results).of(*where, "real rounds", rate) == [2.2, 2.0]
    fewer = {run: outcome for run, outcome in results.items() if (run.method, run.seed) != ("cut rounds", 1)}
    assert Losses(fewer).of(*where, "real rounds", rate) == [2.0, 2.3], "of as many seeds at least"


def test_a_cut_schedule_is_as_long_as_without_exchanges() -> None:
    whole, cut = (real.race_of(Run("transformer", "equal", 8, 0, 200, m, "rate=0.015")) for m in (real.ROUNDS, real.CUT_ROUNDS))
    assert (cut["schedule"], cut["by_rounds"], "by_rounds" in whole) == (whole["schedule"], True, False)
    ours, longer = (
        real.race_of(Run("transformer", "equal", 8, 0, 200, m, plan.ours(plan.BOTH))) for m in (real.OURS, real.CUT_OURS)
    )
    assert ours["schedule"] == pytest.approx(0.95 * longer["schedule"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (real.OURS, plan.ours(plan.BOTH)),
        (real.ROUNDS, "rate=0.01 team=proportion"),
        (real.ROUNDS, "rate=0.01 team=backup first=2"),
    ],
)
def test_a_race_ends_at_its_time_with_a_loss(method: str, settings: str) -> None:
    outcome = real.make(Run("transformer", "straggler", 3, 0, 8, method, settings), None)
    assert outcome.loss is not None
    assert outcome.loss < 4.5
    assert 0 < outcome.gradients < 8 * 3 + 1
    assert [time for time, _ in outcome.curve] == sorted(time for time, _ in outcome.curve if time <= outcome.time)
