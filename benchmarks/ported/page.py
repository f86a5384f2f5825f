"""The page of the programs: a table from the stored results, the unfavourable first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.lib.page import count, filled, short, table
from benchmarks.ported.program import Program, load, names
from benchmarks.ported.runs import KINDS, NOISE, Outcome, Run, stored

HEADS = (
    "Program", "Lines", "One worker: loss differs by at most", "Quality", "Alone", "One worker", "Three, as many samples",
    "Three, as long", "Seconds", "Seeds",
)  # fmt: skip
CLOSE = 1.0001e-4  # losses that differ by no more agree: one in the fourth digit printed, or rounding of a step
Results = Mapping[Run, Outcome]


def draw(folder: Path) -> Path:
    """Writes ported.md from the results in the folder beside it. Returns the page's path."""
    programs = [load(name) for name in names()]
    known = [(program, stored(folder, program.name)) for program in programs]
    measured = [each for each in known if seeds(each[1])]
    lines = sorted(program.lines for program in programs)
    worse = [program.name for program, results in measured if gain(program, results) < -noise(results)]
    return filled(
        Path(__file__).with_name("page.txt"), folder.with_suffix(".md"),
        table=ported_table(measured), programs=count(len(programs), "program"), median=short(median(lines or [0])),
        most=max(lines, default=0), several=sum(len(seeds(results)) >= 3 for _, results in known),
        worse=", ".join(worse) or "none", sources=_sources(programs),
        notes="\n".join(f"- **{program.name}**: {program.note}" for program in programs if program.note),
        missing=", ".join(program.name for program, results in known if not seeds(results)) or "none",
    )  # fmt: skip


def ported_table(measured: Sequence[tuple[Program, Results]]) -> str:
    """A row for each program: those where three workers lose most, in the time of one, come first."""
    ranked = sorted(measured, key=lambda each: gain(*each))
    return table(HEADS, (_row(program, results) for program, results in ranked))


def _row(program: Program, results: Results) -> list[str]:
    have = seeds(results)
    qualities = [_range([results[Run(kind, seed)].quality for seed in have]) for kind in KINDS]
    seconds = " / ".join(f"{mean(results[Run(kind, seed)].seconds for seed in have):.0f}" for kind in KINDS)
    name = f"**{program.name}**: {program.about}"
    metric = f"{program.metric} {'↑' if program.higher else '↓'}"
    return [name, str(program.lines), apart(program, results), metric, *qualities, seconds, str(len(have))]


def seeds(results: Results) -> list[int]:
    """The seeds of which every kind of run is there."""
    return sorted(seed for seed in {run.seed for run in results} if all(Run(kind, seed) in results for kind in KINDS))


def apart(program: Program, results: Results) -> str:
    """The largest difference between a loss alone and with one worker. If it is more than rounding of the printed digits, also
    that between two runs alone, of which one starts a rounding away."""
    if not (program.replayed and program.deterministic):
        return "not replayed" if program.deterministic else "not deterministic"
    if any(len(results[Run("plain", seed)].losses) > len(results[Run("one", seed)].losses) for seed in seeds(results)):
        return "fewer losses"
    found = [each for seed in seeds(results) for each in _differences(results, "one", seed)]
    if agrees(program, results):
        return f"{max(found):.1e} of {len(found)}" if any(found) else f"0 of {len(found)}"
    text = f"{_begin(results, 'one', seeds(results))}, of {len(found)}"
    return text + (f"; rounding alone: {_begin(results, NOISE, [0])}" if Run(NOISE, 0) in results else "")


def agrees(program: Program, results: Results) -> bool:
    """Whether one worker has the losses of the program alone, or can't be compared with it."""
    compared = program.replayed and program.deterministic
    return not compared or not any(each > CLOSE for seed in seeds(results) for each in _differences(results, "one", seed))


def _begin(results: Results, kind: str, have: Sequence[int]) -> str:
    """The largest difference of a kind of run, and the loss from which it grows."""
    found = [_differences(results, kind, seed) for seed in have]
    first = min(next((number for number, apart_by in enumerate(each, 1) if apart_by > CLOSE), len(each)) for each in found)
    return f"{max(map(max, found)):.1e} from loss {first} on"


def _differences(results: Results, kind: str, seed: int) -> list[float]:
    alone, other = results[Run("plain", seed)].losses, results[Run(kind, seed)].losses
    return [abs(x - y) for x, y in zip(alone, other, strict=False)]


def gain(program: Program, results: Results) -> float:
    """How much better three workers are in the time of one, as a share of one worker's quality."""
    have = seeds(results)
    one, longer = (mean(results[Run(kind, seed)].quality for seed in have) for kind in ("one", "longer"))
    return (longer - one) / (abs(one) or 1.0) * (1 if program.higher else -1)


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
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def _sources(programs: Sequence[Program]) -> str:
    heads = ("Program", "Source", "Licence", "Server", "Packages")
    rows = (
        [
            program.name, f"[{'/'.join(program.repository.split('/')[-2:])}]({program.repository}) {program.script} "
            f"@ {program.commit[:10]}", program.licence, f"`{program.server}`", ", ".join(program.packages) or "–",
        ]
        for program in programs
    )  # fmt: skip
    return table(heads, rows)
