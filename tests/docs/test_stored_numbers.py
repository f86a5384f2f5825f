"""Numbers that the pages give are those of stored results: README's claims one by one, pages of results as a whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from benchmarks import tuning
from benchmarks.finals import __main__ as whole_trainings
from benchmarks.finals import plan
from benchmarks.finals import runs as finals
from benchmarks.finals.page import Losses
from benchmarks.many_workers import __main__ as many_workers
from benchmarks.unequal_data import __main__ as unequal_data
from benchmarks.unequal_data import runs as unequal_runs
from benchmarks.versus.__main__ import main as versus
from benchmarks.versus.profiles import KINDS
from benchmarks.versus.simulated import __main__ as simulated

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")


FINALS = finals.stored(RESULTS / "versus/finals.json")


def behind() -> dict[str, tuple[float, float]]:
    """By kind of cluster: the held-out loss of this server less the best that an expert would build, and that of DDP on all
    workers less this server's."""
    losses, found = Losses(FINALS), {}
    for profile in KINDS:
        where = ("transformer", profile, 8, 200)
        ours = mean(losses.of(*where, "ours", plan.ours(plan.BOTH)))
        rivals = {
            team: mean(each) for team in plan.designs(profile, 8).values() if (each := losses.best(where, "rounds", team)[1])
        }
        found[profile] = ours - min(rivals.values()), rivals[""] - ours
    return found


def beside_an_expert() -> str:
    expert = {profile: one for profile, (one, _) in behind().items()}
    last = sorted(profile for profile, one in expert.items() if one > 0)
    assert last == ["mixed", "pausing"]
    return (
        f"this server is {expert['mixed']:.3f} and {expert['pausing']:.3f} behind that, about a standard error; in the other "
        f"eight it is level or ahead: {-expert['equal']:.2f} with equal workers, {-expert['exponential']:.2f} with exponential "
        "times"
    )


def beside_ddp() -> str:
    others = [ddp for _, ddp in behind().values()]
    return f"DDP on all workers is {min(others):.2f} to {max(others):.2f} behind"


def with_rare_digits() -> str:
    known = unequal_runs.stored(RESULTS / "unequal-data/results.json")
    found = {name: unequal_runs.reported(known, name, 10) for name in unequal_runs.METHODS}
    rare = {name: [100 * each.rare for each in one[1]] for name, one in found.items() if one}
    share = {name: f"{np.mean(each):.0f} % ({min(each):.0f}–{max(each):.0f})" for name, each in rare.items()}
    tuned = f"{share['dana']} under DANA, {share['adamw']} under `gem` around AdamW, {share['synchronous']} synchronously"
    usual = f"{share['gem']} are right under `gem` at the usual rate"
    return f"{usual}; with tuned rates {tuned} in the same time, {share['downpour']} under `downpour`"


CLAIMS: dict[str, Callable[[], str]] = {
    "beside an expert": beside_an_expert,
    "beside DDP": beside_ddp,
    "rare digits": with_rare_digits,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_number_of_the_readme_is_a_stored_one(claim: str) -> None:
    assert CLAIMS[claim]() in README


def test_no_other_measured_number_is_in_the_readme() -> None:
    """Percentages and decimals outside code; what another page's test holds is named here."""
    held_elsewhere = [
        "15 % of its worker's own step",  # the default of reply_wait
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
    shutil.copytree(RESULTS / name, target, ignore=shutil.ignore_patterns("README.md", "*.png", "simulated.md", "finals.md"))
    return target


def drawn(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(module, "RESULTS", folder)
    assert CliRunner().invoke(module.main, arguments, catch_exceptions=False).exit_code == 0


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **settings: Path(path).touch())
    monkeypatch.setattr("benchmarks.many_workers.figures.stable_below", lambda *_: 1.0)  # a curve of many points


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("name", "page"),
    [("versus", "README.md"), ("versus", "simulated.md"), ("versus", "finals.md"), ("many-workers", "README.md"),
     ("unequal-data", "README.md"), ("tuning", "README.md")],
)  # fmt: skip
def test_a_page_of_results_is_drawn_from_what_is_stored(
    name: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path, name)
    if page == "simulated.md":
        drawn(simulated, folder, monkeypatch, "--draw-only")
    elif page == "finals.md":
        monkeypatch.setattr(whole_trainings, "RESULTS", folder)
        whole_trainings._write(finals.stored(folder / "finals.json"))
    elif name != "versus":
        drawn({"many-workers": many_workers, "unequal-data": unequal_data, "tuning": tuning}[name], folder, monkeypatch)
    else:
        assert CliRunner().invoke(versus, ["--draw-only", "--out", str(folder)], catch_exceptions=False).exit_code == 0
    assert (folder / page).read_text(encoding="utf-8") == (RESULTS / name / page).read_text(encoding="utf-8")
