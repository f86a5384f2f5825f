"""The results page: each claim with what was measured, then every figure, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.page import count
from benchmarks.paper.claims import OURS, PAPER, Agreement, Claim
from benchmarks.paper.plan import FIGURES, Scale
from benchmarks.paper.results import Result
from benchmarks.paper.statistics import Measured

_NOT_RUN = "not run"
_HERE = Path(__file__).parent
_TASKS = {"mnist": "MNIST", "digits": "scikit-learn's digits"}
_JUDGED = "|".join(re.escape(each) for each in Agreement if each is not Agreement.UNKNOWN)
_BATCH = 64  # of every run, if its figure says nothing else
_REMARKS = "What was not run, and what differs"  # written by hand, and kept
_HEADINGS = {
    "1": "Fig. 1: more workers", "2": "Fig. 2: as many workers as the paper has", "3": "Fig. 3: π and the number of workers",
    "4": "Fig. 4: time, at a fixed effective batch", "5": "Fig. 5: against sequential momentum SGD",
    "6": "Fig. 6: a misspecified learning rate", "8": "Fig. 8: κ", "9-10": "Figs. 9 and 10: π of each tensor",
    "conventions": "Snapshot conventions", "straggler": "A straggler", "churn": "Workers that come and go",
    "proxies": "Other proxies", "beyond": "From 1 to 1,000 workers",
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """A figure's results so far, and its total number of runs.

    Attributes:
        measured: The lines to draw; none if there are only a few.
        known: All lines that have a result. They judge claims that have no verdict yet.
    """

    measured: list[Measured]
    planned: int
    known: tuple[Measured, ...] = ()

    @property
    def runs(self) -> list[Result]:
        return [result for each in self.measured for result in each.results]


def write(folder: Path, scale: Scale, states: Mapping[str, State], note: str) -> Path:
    """Writes README.md for the figures' PNGs in the folder. A figure without runs keeps its section and its claims of the page
    as it was, because you may not have all runs; so does the head if there are no runs at all."""
    page = folder / "README.md"
    before = page.read_text() if page.exists() else ""
    sections = {name: old for name in FIGURES if not states[name].measured and (old := _figure_before(before, name))}
    rows = [line for line in before.splitlines() if line.startswith(tuple(f"- **{name}: " for name in sections))]
    runs = any(state.measured for state in states.values())
    claims = _claims("The paper's claims", PAPER, states, rows)
    parts = [
        *(_head(scale, states, note, list(sections), claims) if runs else [before.partition("\n## ")[0].strip()]),
        *filter(None, [_section(before, _REMARKS)]),
        claims,
        _claims("Beyond the paper", OURS, states, rows),
        *(sections.get(name) or _figure(name, states[name], scale) for name in FIGURES),
    ]
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _section(before: str, heading: str) -> str:
    """The section of the page as it was; empty if it had none."""
    _, found, rest = before.partition(f"## {heading}\n")
    return f"{found}\n{rest.partition(chr(10) + '## ')[0].strip()}" if found else ""


def _figure_before(before: str, figure: str) -> str | None:
    """The section about a figure in the page as it was; None if it had no runs then either."""
    section = _section(before, _HEADINGS[figure])
    return section if f"({figure}.png)" in section else None


def _head(scale: Scale, states: Mapping[str, State], note: str, earlier: list[str], claims: str) -> list[str]:
    """The page's first paragraphs."""
    runs = {result.experiment: result for state in states.values() for result in state.runs}
    versions = [f"{name} {number}" for name, number in next(iter(runs.values())).versions.items()] if runs else []
    seeds = f"{scale.seeds} seeds" if scale.seeds > 1 else "one seed"
    agree, judged = (len(re.findall(rf"^- .*: ({verdicts});", claims, re.MULTILINE)) for verdicts in (Agreement.YES, _JUDGED))
    text = (_HERE / "page.txt").read_text()
    head = text.format(task=_TASKS[scale.task], steps=scale.steps, seeds=seeds, agree=agree, judged=judged).strip()
    made = f"{len(runs)} runs" + (f", with {', '.join(versions)}" if versions else "")
    if earlier:
        new = ", ".join(name for name in FIGURES if name not in earlier)
        made = f"Figs. {new}: {made}; the other figures are of earlier ones."
    return [head, made, *([f"**{note}**"] if note else [])]


def _claims(title: str, claims: tuple[Claim, ...], states: Mapping[str, State], old: list[str]) -> str:
    rows = [f"## {title}", ""]
    for claim in claims:
        state, begin = states[claim.figure], f"- **{claim.figure}: {claim.text}**: "
        earlier = next((line for line in old if line.startswith(begin) and not line.endswith(_NOT_RUN)), None)
        verdict = claim.judge(state.measured) or (claim.judge([*state.known]) if earlier is None else None)
        rows.append(f"{begin}{verdict.agrees}; {verdict.measured}" if verdict else earlier or begin + _NOT_RUN)
    return "\n".join(rows)


def _figure(name: str, state: State, scale: Scale) -> str:
    heading = f"## {_HEADINGS[name]}"
    if not state.measured:
        return f"{heading}\n\nNot run yet: `python -m benchmarks.paper {name} --data DIR`."
    figure = _HEADINGS[name].partition(":")[0]
    lines = [heading, "", f"![{figure}]({name}.png)", "", f"{_amounts(state, scale)} [Data]({name}.json)."]
    return "\n".join(lines)


def _amounts(state: State, scale: Scale) -> str:
    """A sentence that describes a figure's runs, as far as the page's head does not."""
    runs = state.runs
    steps = sorted({run.experiment.steps for run in runs if run.experiment.setting != "sequential"})
    seeds = sorted({run.experiment.seed for run in runs})
    batches = sorted({run.experiment.batch_size for run in runs})
    own = [
        f", {_listed(steps)} steps" * (steps != [scale.steps]), f", batch {_listed(batches)}" * (batches != [_BATCH]),
        f", {count(len(seeds), 'seed')}" * (len(seeds) != scale.seeds),
    ]  # fmt: skip
    text = f"{len(runs)} runs{''.join(own)}."
    missing = state.planned - len(runs)
    if missing:
        text += f" **{missing} of {state.planned} runs missing.**"
    if any(run.experiment.setting == "simulated" for run in runs):
        text += " Simulated workers."
    elif any(run.experiment.step_seconds for run in runs):
        text += " Simulated compute time."
    return text


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
