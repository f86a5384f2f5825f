"""The stored results of the comparison, and the page and plots made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gem_worker.launcher.run_folder import RunFolder

from benchmarks.lib.launch import RunFailed, launch
from benchmarks.models import figures, page
from benchmarks.models.analysis import difference, summary
from benchmarks.models.cli import main
from benchmarks.models.measure import here, measure, stored
from benchmarks.models.plan import STAGES, STEPS, Results, case, mnist_case
from benchmarks.models.runs import METHODS, Outcome, Run
from benchmarks.paper.statistics import Spread

RUN = replace(case("gem-adamw", 16), place=-5)
GOOD = Outcome("complete", 2.25, None, 30.0, 14.9, 0.01)
DIVERGED = Outcome("diverged", None, None, 5.0, None, None)


def complete(run: Run) -> Outcome:
    """A made-up result of every run: each method is 0.1 worse than the one before; rates beyond the grid diverge."""
    rates = METHODS[run.method].rates
    if run.task == "characters" and run.place == rates[3]:
        return DIVERGED
    loss = 2 + 0.1 * list(METHODS).index(run.method) + 0.2 * abs(run.place - rates[1]) + 0.01 * run.seed
    return Outcome("complete", loss, 0.97 if run.task == "mnist" else None, 30.0, run.workers - 1, 0.1)


def half(run: Run) -> Outcome | None:
    """Only 16 workers are measured, and only under the first seed; the first method lacks a rate."""
    lacks = run.method == "gem-adamw" and run.place == METHODS["gem-adamw"].rates[2]
    return complete(run) if run.workers == 16 and run.seed == 0 and not lacks else None


def written(folder: Path, results: Results) -> str:
    return page.write(folder, results, here(), figures.draw(folder, results)).read_text(encoding="utf-8")


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The table under a heading, by first cell."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in table[2:]}


def test_damaged_results_are_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")
    done = CliRunner().invoke(main, ["--draw-only", "--out", str(tmp_path)])
    assert (done.exit_code, "Traceback" in done.output, "can't be read" in done.output) == (1, False, True)


def test_results_of_another_python_are_not_continued(tmp_path: Path) -> None:
    store = stored(tmp_path / "results.json")
    store.head["conditions"]["python"] = "3.1.4"
    store.add(RUN, GOOD)
    done = CliRunner().invoke(main, ["rates-16", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "are on the standard library of Python 3.1.4" in done.output
    assert CliRunner().invoke(main, ["--draw-only", "--out", str(tmp_path)]).exit_code == 0


def test_wrong_stages_are_refused() -> None:
    assert "there is no stage 'rates-5': choose from rates-16" in CliRunner().invoke(main, ["rates-5"]).output
    assert "needs --mnist DIR" in CliRunner().invoke(main, ["mnist"]).output


def test_a_page_without_results_says_so(tmp_path: Path) -> None:
    text = written(tmp_path, lambda run: None)
    assert "**0 runs so far. Missing**" in text
    assert {cell for row in rows(text, "Losses").values() for cell in row} == {"not run"}
    assert list(tmp_path.glob("*.png")) == []


def test_a_page_says_what_is_missing(tmp_path: Path) -> None:
    text = written(tmp_path, half)
    losses = rows(text, "Losses")
    assert losses["GEM around a shared AdamW"][2] == "2.000 so far, 3 of 4 rates"
    assert losses["shared AdamW as it comes"] == ["not run", "not run", "2.100, 1 seed, 0.0003", "not run"]
    assert "rates-16 1 of 32" in text
    assert "**To be written, in `remarks.md`" in text
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["rates.png", "workers.png"]


def test_a_complete_page_has_every_figure(tmp_path: Path) -> None:
    (tmp_path / "remarks.md").write_text("## Verdict\n\nMatching wins.\n")
    text = written(tmp_path, complete)
    assert "Matching wins." in text
    assert "To be written" not in text
    assert "nothing is missing" in text
    assert "not run" not in text
    losses = rows(text, "Losses")
    assert losses["GEM around a shared AdamW"] == ["2.010 (2.000 to 2.020), 0.001"] * 4
    assert losses["the paper's GEM (SGD)"] == ["2.710 (2.700 to 2.720), 0.1"] * 4
    changes = rows(text, "What energy matching changes")
    assert changes["GEM around a shared AdamW"][1:] == ["**-0.700**"] * 4
    assert rows(text, "Beside one worker")["16"][-1] == "GEM around a shared AdamW"
    assert rows(text, "κ")["the paper's GEM (SGD)"] == ["32", *["2.710 (2.700 to 2.720)"] * 3]
    assert rows(text, "MNIST with 30 workers")["the paper's GEM (SGD)"][0] == "97.00 (97.00 to 97.00) %"


def test_a_best_rate_at_the_end_of_its_grid_is_marked(tmp_path: Path) -> None:
    text = written(tmp_path, lambda run: replace(GOOD, test_loss=3 - 0.1 * run.place))
    assert rows(text, "Losses")["the paper's GEM (SGD)"][0].endswith("10 *")
    assert "* The best rate is the lowest or the highest" in text


def test_a_method_that_diverges_everywhere_says_so(tmp_path: Path) -> None:
    text = written(tmp_path, lambda run: DIVERGED if run.method == "downpour-adamw" else complete(run))
    assert rows(text, "Losses")["shared AdamW as it comes"] == ["diverged at every rate"] * 4


def test_diverged_rates_are_marked_in_the_plot() -> None:
    drawing = figures.rates(complete)
    assert drawing is not None
    for panel in drawing.axes:
        marked = [np.size(line.get_xdata()) for line in panel.lines if line.get_marker() == "^"]
        assert marked == [1] * len(STEPS), "each number of workers diverged at one rate"


def test_a_difference_needs_all_seeds_and_says_whether_ranges_are_apart() -> None:
    def under(*losses: float) -> Results:
        return lambda run: replace(GOOD, test_loss=losses[run.seed]) if run.seed < len(losses) else None

    runs = [replace(RUN, seed=seed) for seed in range(3)]
    low, high, wide = (summary(runs, under(*losses)) for losses in ((2.0, 2.25, 2.5), (3.0, 3.25, 3.5), (2.0, 3.25, 4.5)))
    assert low.loss == Spread(2.25, 2.0, 2.5, 3)
    assert difference(low, high) == (-1.0, True)
    assert difference(high, wide) == (0.0, False)
    assert difference(low, summary(runs, under(2.0))) is None
    broken = summary(runs, lambda run: DIVERGED)
    assert difference(low, broken) == (float("-inf"), True)
    assert broken.diverged == 3


def test_a_run_that_starts_but_leaves_nothing_fails_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="exit status 7: no luck"):
        launch(["sh", "-c", "echo begun; echo no luck; exit 7"], tmp_path / "output")
    found = launch(["sh", "-c", f"echo 'run {tmp_path}: 2 workers'; exit 3"], tmp_path / "output")
    assert isinstance(found, RunFolder)
    assert found.path == tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_measured_for_real() -> None:
    """Workers' own AdamW: its rate and warm-up reach the workers, or nothing would be learned in so few steps."""
    run = Run("gem-own", 2, 12, -5, kappa=2.0, batch_size=4, warmup=2)
    outcome = measure(run, None)
    assert outcome.outcome == "complete"
    assert outcome.test_loss is not None
    assert outcome.test_loss < 4.0, "guessing has 4.56"
    assert outcome.staleness is not None
    assert 0 <= outcome.staleness <= 2
    assert outcome.pi is not None
    assert 0 < outcome.pi <= 1
    still = measure(replace(run, place=-16), None)
    assert still.test_loss is not None
    assert still.test_loss > 4.4, "a rate of 1e-8 changes nothing"


def test_every_stage_is_named_in_the_help() -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for name in STAGES:
        assert name in shown, f"--help does not name stage {name}"
    assert mnist_case("gem-sgd").workers == 30
