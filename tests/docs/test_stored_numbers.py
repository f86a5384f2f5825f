"""Numbers that the pages give are those of stored results: README's claims one by one, pages of results as a whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from benchmarks.many_workers import __main__ as many_workers
from benchmarks.models.cli import main as models
from benchmarks.unequal_data import __main__ as unequal_data
from benchmarks.unequal_data import runs as unequal_runs
from benchmarks.versus.analysis import cell, fast_alone, one_workers, ratio, tuned
from benchmarks.versus.cli import main as versus
from benchmarks.versus.measure import stored
from benchmarks.versus.plan import Case
from benchmarks.versus.simulated import __main__ as simulated

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")


KNOWN = stored(RESULTS / "versus/results.json", 400.0).get


def ratios(*profiles: str, which: int = 1) -> list[float]:
    """Our time over DDP's to a loss of the transformer, where DDP reached it, with 4, 8 and 16 workers; the lower loss: 1."""
    found = []
    for n, profile in product((4, 8, 16), profiles):
        ours, theirs = Case("gem", "transformer", n), Case("ddp", "transformer", n)
        mine, base = (cell(one, profile, rate(one, KNOWN), KNOWN) for one, rate in ((ours, one_workers), (theirs, tuned)))
        if base is not None and base.mean(which) is not None:
            value = ratio(mine, base, which)
            assert value is not None
            found.append(value)
    return found


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def times_of_ddp() -> str:
    higher = ratios("noisy", "exponential", "mixed", "straggler", which=0)
    vary = ratios("noisy", "exponential")
    return (
        f"takes {span(ratios('equal'))} of the time of DDP on all workers if they are equal, "
        f"{span(vary)} if their times vary, {span(ratios('mixed'))} if half of them are slow, and with "
        f"8 and 16 workers {span(ratios('straggler'))} if one is; to the higher loss {span(ratios('equal', which=0))}, and "
        f"{span(higher)} otherwise"
    )


def without_the_slow() -> str:
    def times(contender: str, alone: bool) -> str:
        cases = [Case(contender, "transformer", n) for n in (8, 16)]
        cells = [fast_alone(one, "mixed", KNOWN) if alone else cell(one, "mixed", tuned(one, KNOWN), KNOWN) for one in cases]
        return " and ".join(f"{mean:.0f}" for each in cells if each is not None and (mean := each.mean(1)) is not None)

    return (
        f"this server takes {times('gem', False)} units; on the fast half alone DDP takes {times('ddp', True)}, this server "
        f"{times('gem', True)}"
    )


def as_soon() -> str:
    vary, (far,) = ratios("noisy", "exponential"), ratios("far")
    ours, theirs = (
        cell(one, "spot", tuned(one, KNOWN), KNOWN) for one in (Case(name, "transformer", 8) for name in ("gem", "torchft"))
    )
    killed = ratio(ours, theirs, 1)
    assert killed is not None
    return (
        f"{1 / max(vary):.1f} to {1 / min(vary):.1f} times as soon](docs/results/versus/README.md) as with DDP if times vary, "
        f"{1 / far:.1f} times if two of 8 workers are far away, and {1 / killed:.1f} times as soon as with torchft"
    )


def with_rare_digits() -> str:
    known = unequal_runs.stored(RESULTS / "unequal-data/results.json")
    found = {name: unequal_runs.reported(known, name, 10) for name in unequal_runs.METHODS}
    rare = {name: [100 * each.rare for each in one[1]] for name, one in found.items() if one}
    share = {name: f"{np.mean(each):.0f} % ({min(each):.0f}–{max(each):.0f})" for name, each in rare.items()}
    tuned = f"{share['dana']} under DANA, {share['adamw']} under `gem` around AdamW, {share['synchronous']} synchronously"
    usual = f"{share['gem']} are right under `gem` at the usual rate"
    return f"{usual}; with tuned rates {tuned} in the same time, {share['downpour']} under `downpour`"


CLAIMS: dict[str, Callable[[], str]] = {
    "versus": times_of_ddp,
    "without the slow": without_the_slow,
    "as soon": as_soon,
    "rare digits": with_rare_digits,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_number_of_the_readme_is_a_stored_one(claim: str) -> None:
    assert CLAIMS[claim]() in README


def test_no_other_measured_number_is_in_the_readme() -> None:
    """Percentages and decimals outside code; what another page's test holds is named here."""
    held_elsewhere = [
        "1.14 and 1.24 times as long",
        "0.96 to 1.06",  # results/versus/simulated.md
        "Python 3.11",
    ]
    text = re.sub(r"```.*?```", "", README, flags=re.S)
    for known in [*(claim() for claim in CLAIMS.values()), *held_elsewhere]:
        text = text.replace(known, "")
    text = re.sub(r"\(https?://\S+?\)|\([\w/.-]+\.(?:png|md)[^)]*\)", "", text)
    assert re.findall(r"\d[\d.,]*\s%|\d+\.\d+", text) == []


def copied(folder: Path, name: str) -> Path:
    """The stored results and what is written by hand, without the page and the pictures."""
    target = folder / name
    shutil.copytree(RESULTS / name, target, ignore=shutil.ignore_patterns("README.md", "*.png", "simulated.md"))
    return target


def drawn(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(module, "RESULTS", folder)
    assert CliRunner().invoke(module.main, arguments, catch_exceptions=False).exit_code == 0


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **settings: Path(path).touch())


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("name", "page"),
    [("versus", "README.md"), ("versus", "simulated.md"), ("models", "README.md"), ("many-workers", "README.md"),
     ("unequal-data", "README.md")],
)  # fmt: skip
def test_a_page_of_results_is_drawn_from_what_is_stored(
    name: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path, name)
    if page == "simulated.md":
        drawn(simulated, folder, monkeypatch, "--draw-only")
    elif name in ("many-workers", "unequal-data"):
        drawn({"many-workers": many_workers, "unequal-data": unequal_data}[name], folder, monkeypatch)
    else:
        command = {"versus": versus, "models": models}[name]
        assert CliRunner().invoke(command, ["--draw-only", "--out", str(folder)], catch_exceptions=False).exit_code == 0
    assert (folder / page).read_text(encoding="utf-8") == (RESULTS / name / page).read_text(encoding="utf-8")
