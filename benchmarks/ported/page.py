"""The page of the programs: a table from the stored results, the unfavourable first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.lib.page import count, filled, short, table
from benchmarks.ported.program import Program, load, names
from benchmarks.ported.runs import KINDS, NOISE, Outcome, Run, stored

HEADS = ("Program", "Lines", "Loss differs by", "Quality", "Alone", "One worker", "Three, as many samples", "Three, as long")
CLOSE = 1.0001e-4  # losses that differ by no more agree: one in the fourth digit printed, or rounding of a step
Results = Mapping[Run, Outcome]


def draw(folder: Path) -> Path:
    """Writes ported.md from the results in the folder beside it. Returns the page's path."""
    programs = [load(name) for name in names()]
    known = [(program, stored(folder, program.name)) for program in programs]
    measured = [each for each in known if seeds(each[1])]
    lines = sorted(program.lines for program in programs)
    behind, worse = (
        {program.name: results for program, results in measured if gain(program, results, kind) < -noise(results)}
        for kind in ("three", "longer")
    )
    return filled(
        Path(__file__).with_name("page.txt"), folder.with_suffix(".md"),
        table=ported_table(measured), programs=count(len(programs), "program"), median=short(median(lines or [0])),
        most=max(lines, default=0), several=sum(len(seeds(results)) >= 3 for _, results in known),
        worse=", ".join(worse) or "none", behind=len(behind), measured=len(measured), notes=_notes(programs),
        single=sum(len(seeds(results)) == 1 and Run(NOISE, 0) not in results for results in behind.values()),
        dealt=", ".join(program.name for program in programs if program.together),
        missing=", ".join(program.name for program, results in known if not seeds(results)) or "none",
    )  # fmt: skip


def ported_table(measured: Sequence[tuple[Program, Results]]) -> str:
    """A row for each program: those where three workers lose most, in the time of one, come first."""
    ranked = sorted(measured, key=lambda each: gain(*each))
    return table(HEADS, (_row(program, results) for program, results in ranked))


def _row(program: Program, results: Results) -> list[str]:
    have = seeds(results)
    qualities = [_range([results[Run(kind, seed)].quality for seed in have]) for kind in KINDS]
    name = f"[{program.name}]({program.address}): {program.about}"
    return [name, str(program.lines), apart(results), program.metric, *qualities]


def seeds(results: Results) -> list[int]:
    """The seeds of which every kind of run is there."""
    return sorted(seed for seed in {run.seed for run in results} if all(Run(kind, seed) in results for kind in KINDS))


def apart(results: Results) -> str:
    """The largest difference between a loss alone and with one worker. If it is more than rounding of the printed digits, also
    that between two runs alone, of which one starts a rounding away."""
    if any(len(results[Run("plain", seed)].losses) > len(results[Run("one", seed)].losses) for seed in seeds(results)):
        return "fewer losses"
    found = max(each for seed in seeds(results) for each in _differences(results, "one", seed))
    if agrees(results):
        return f"{found:.2g}"
    rounding = f"{max(_differences(results, NOISE, 0)):.2g}" if Run(NOISE, 0) in results else "not measured"
    return f"{found:.2g}, rounding {rounding}"


def agrees(results: Results) -> bool:
    """Whether one worker has the losses of the program alone."""
    return not any(each > CLOSE for seed in seeds(results) for each in _differences(results, "one", seed))


def _differences(results: Results, kind: str, seed: int) -> list[float]:
    alone, other = results[Run("plain", seed)].losses, results[Run(kind, seed)].losses
    return [abs(x - y) for x, y in zip(alone, other, strict=False)]


def gain(program: Program, results: Results, kind: str = "longer") -> float:
    """How much better three workers are in the time of one, or in another `kind` of run, as a share of one worker's quality."""
    have = seeds(results)
    one, three = (mean(results[Run(each, seed)].quality for seed in have) for each in ("one", kind))
    return (three - one) / (abs(one) or 1.0) * (1 if program.higher else -1)


def noise(results: Results) -> float:
    """The range of the qualities without others, or of those of three as long, the larger, as a share: rounding and seeds."""
    alone = [outcome.quality for run, outcome in results.items() if run.kind in ("plain", "one", NOISE)]
    longer = [results[Run("longer", seed)].quality for seed in seeds(results)]
    return max(max(values) - min(values) for values in (alone, longer)) / (abs(mean(alone)) or 1.0)


def _range(values: Sequence[float]) -> str:
    """A mean, and the range of the values if there are several."""
    middle, least, most = (
        f"{each:.1e}" if abs(each) >= 1e6 else short(each) for each in (mean(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({least}–{most})"


def _notes(programs: Sequence[Program]) -> str:
    """A line for each note, after the names of the programs that it is about."""
    notes = dict.fromkeys(note for program in programs for note in program.notes)
    return "\n".join(f"- **{', '.join(each.name for each in programs if note in each.notes)}**: {note}" for note in notes)
