"""Makes the simulated runs that have no result yet, then the page: `python -m benchmarks.versus.simulated`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from gem_api.process.lifetime import interruptible

from benchmarks.lib.runs import make_missing
from benchmarks.versus.models import GOALS, Problem
from benchmarks.versus.simulated import plan
from benchmarks.versus.simulated.page import write_page
from benchmarks.versus.simulated.runs import Outcomes, Run, make, stored

RESULTS = Path(__file__).parents[3] / "docs/results/versus"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@interruptible()
@click.argument("questions", nargs=-1, type=click.Choice(list(plan.QUESTIONS)))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--draw-only", is_flag=True, help="Make no runs.")
def main(questions: tuple[str, ...], data: Path | None, draw_only: bool) -> None:
    """Makes the runs without a result for the QUESTIONS, by default all, then the page. Those with MNIST need --data.

    All of them take about two hours on one core. A result is saved at once; several processes may answer different questions.
    """
    torch.set_num_threads(1)
    store = stored(RESULTS / "simulated.json")
    wanted = [] if draw_only else plan.runs(questions or plan.QUESTIONS)
    problems: dict[str, Problem] = {}

    def missing() -> Iterator[tuple[str, Run]]:
        for run in wanted:
            if run not in store and (data is not None or run.model != "convnet"):
                yield str(run), run

    def answer(run: Run) -> str:
        if run.model not in problems:
            problems[run.model] = GOALS[run.model].make(data)
        return _keep(run, problems[run.model], store)

    make_missing(missing(), answer, lambda: write_page(stored(RESULTS / "simulated.json"), RESULTS))


def _keep(run: Run, problem: Problem, store: Outcomes) -> str:
    outcome = make(run, problem)
    store.add(run, outcome)
    return f"{outcome.second} units" if outcome.second is not None else f"not reached; lowest loss {outcome.lowest}"


if __name__ == "__main__":
    main()
