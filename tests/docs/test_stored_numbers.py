"""Numbers that the pages give are those of stored results: README's claims one by one, pages of results as a whole."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import tuning
from benchmarks.finals import __main__ as finals
from benchmarks.finals import plan
from benchmarks.finals.clock import Clock
from benchmarks.finals.page import (
    FOUR,
    Losses,
    ablations,
    against,
    best_form,
    differences,
    elsewhere,
    headline,
    lost_at_one_rate,
    told,
    verdict,
)
from benchmarks.finals.runs import Run, limit_of, settings_of, stored, take_policy
from benchmarks.many_workers import __main__ as many_workers
from benchmarks.paper import page as paper
from benchmarks.paper.plan import FIGURES, Scale
from benchmarks.unequal_data import __main__ as unequal_data
from benchmarks.unequal_data import runs as unequal_runs
from benchmarks.versus.profiles import KINDS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")


WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FINALS = stored(RESULTS / "versus/finals.json")


def beside_an_expert() -> str:
    found = {profile: differences(Losses(FINALS), ("transformer", profile, 8, 200)) for profile in KINDS}
    apart = {profile: mean(each) for profile, each in found.items()}
    verdicts = Counter(map(verdict, found.values()))
    assert [profile for profile, each in found.items() if verdict(each) == "higher"] == ["exponential", "pausing"]
    assert (verdicts["lower"], verdicts["level"], {len(each) for each in found.values()}) == (6, 2, {12})
    assert all(mean(differences(Losses(FINALS), ("transformer", each, 8, 1000))) > 0 for each in FOUR), "after 1,000 rounds"
    return (
        f"| AdamW as PyTorch sets it, ten kinds | {verdicts['lower']} (equal workers: by {-apart['equal']:.3f}) | "
        f"{verdicts['level']} | {verdicts['higher']} (pauses: by {apart['pausing']:.3f}; exponential times: by "
        f"{apart['exponential']:.3f}) |"
    )


def beside_a_shorter_memory() -> str:
    found = [against(Losses(FINALS), profile) for profile in KINDS]
    assert {len(each) for each in found} == {12}
    verdicts = Counter(map(verdict, found))
    assert f"lower in {WORDS[verdicts['lower']]} and higher in {WORDS[verdicts['higher']]}" in README
    return f"for DDP, 9/16 as long | {verdicts['lower']} | {verdicts['level']} | {verdicts['higher']} |"


def beside_ddp() -> str:
    losses, found = Losses(FINALS), []
    for profile in KINDS:
        where = ("transformer", profile, 8, 200)
        found.append(mean(losses.best(where, "rounds", "")[1]) - mean(losses.of(*where, "ours", plan.ours(plan.BOTH))))
    return f"DDP on all workers ends {min(found):.2f} to {max(found):.2f} higher"


def with_rare_digits() -> str:
    known = unequal_runs.stored(RESULTS / "unequal-data/results.json")
    found = {name: unequal_runs.reported(known, name, 10) for name in unequal_runs.METHODS}
    rare = {name: [100 * each.rare for each in one[1]] for name, one in found.items() if one}
    assert {len(each) for each in rare.values()} == {len(unequal_runs.SEEDS)}
    share = {name: f"{np.mean(each):.0f} % ({min(each):.0f}–{max(each):.0f})" for name, each in rare.items()}
    return (
        f"[{share['in step']}](docs/results/unequal-data/README.md) of these right with AdamW, where that worker's batches are "
        f"smaller; {share['adamw']} if they are not. Others: `gem` with SGD {share['gem']}, DANA {share['dana']}, synchronous "
        f"SGD {share['synchronous']}"
    )


def at_a_constant_rate() -> str:
    usual, shorter = (
        Counter(
            verdict(differences(Losses(FINALS), ("transformer", each, 8, 200), plan.CONSTANT, memory=memory)) for each in FOUR
        )
        for memory in ("", plan.SHORTER)
    )
    cells = (f"{usual[each]} ({shorter[each]})" for each in ("lower", "level", "higher"))
    return f"a constant rate, four kinds (and shorter averages for DDP) | {' | '.join(cells)} |"


def with_real_processes() -> str:
    found = {each: verdict(differences(Losses(FINALS), ("transformer", each, 8, 200), kind="real ")) for each in FOUR}
    verdicts = Counter(found.values())
    assert [each for each in FOUR if found[each] == "level"] == ["exponential"]
    return f"four kinds, three seeds | {verdicts['lower']} | 1 (exponential times) | {verdicts['higher']} |"


def with_programs_of_others() -> str:
    page = (RESULTS / "ported.md").read_text(encoding="utf-8")
    ((worse, of),) = re.findall(r"three workers end worse in (\d+) of (\d+)", page)
    (single,) = re.findall(r"in (\d+) with one seed", page)
    (in_time,) = re.findall(r"In the time of one: (\S*)\.", page)
    return (
        f"Of {of} [programs of others](docs/results/ported.md) with three workers {worse} end worse than one worker with as "
        f"many samples ({single} of them: one seed), {len(in_time.split(', '))} in the same time"
    )


def with_more_workers() -> str:
    (row,) = re.findall(r"^\| 16 \| .*× .*$", (RESULTS / "versus/finals.md").read_text(encoding="utf-8"), re.M)
    return f"one worker needs only [{' to '.join(sorted(re.findall(r'[0-9.]+(?= ×)', row)))} times as long]"


CLAIMS: dict[str, Callable[[], str]] = {
    "beside an expert": beside_an_expert,
    "beside a shorter memory": beside_a_shorter_memory,
    "beside DDP": beside_ddp,
    "at a constant rate": at_a_constant_rate,
    "real processes": with_real_processes,
    "rare digits": with_rare_digits,
    "programs of others": with_programs_of_others,
    "more workers": with_more_workers,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_number_of_the_readme_is_a_stored_one(claim: str) -> None:
    assert CLAIMS[claim]() in README


def test_no_other_measured_number_is_in_the_readme() -> None:
    """Percentages and decimals outside code; what another page's test holds is named here."""
    held_elsewhere = [
        "15 % of a worker's step",  # the default of reply_wait
        "[7.56 ×](docs/costs.md)",  # what `gem-ctl plan` says there
        "0.1 less multiplies the right character's probability by 1.1",  # e to the 0.1
        "Python 3.11",
    ]
    text = re.sub(r"```.*?```", "", README, flags=re.S)
    for known in [*(claim() for claim in CLAIMS.values()), *held_elsewhere]:
        text = text.replace(known, "")
    text = re.sub(r"\(https?://\S+?\)|\([\w/.-]+\.(?:png|md)[^)]*\)", "", text)
    assert re.findall(r"\d[\d.,]*\s%|\d+\.\d+", text) == []


def test_the_tables_of_the_method_are_of_stored_runs() -> None:
    text, losses = (ROOT / "docs/method.md").read_text(encoding="utf-8"), Losses(FINALS)
    for table in (headline(losses), elsewhere(losses), ablations(losses)):
        assert table in text
    assert f"loses at most {max(lost_at_one_rate(losses, '0.015')):.3f}" in text


def test_the_report_has_the_verdicts_of_seeds_that_had_no_part_in_any_choice() -> None:
    fresh = Losses({run: outcome for run, outcome in FINALS.items() if run.seed in plan.FRESH})
    usual = [differences(fresh, ("transformer", profile, 8, 200)) for profile in KINDS]
    shorter = [against(fresh, profile) for profile in KINDS]
    assert {len(each) for each in (*usual, *shorter)} == {len(plan.FRESH)}
    (first, second) = (Counter(map(verdict, each)) for each in (usual, shorter))
    assert (
        f"this server is lower in {WORDS[first['lower']]}, level in {WORDS[first['level']]}, higher in {WORDS[first['higher']]}"
        f"; with the shorter memory lower in {WORDS[second['lower']]}, level in {WORDS[second['level']]}, higher in "
        f"{WORDS[second['higher']]}"
    ) in (ROOT / "docs/method.md").read_text(encoding="utf-8")


def test_the_report_says_when_waits_end() -> None:
    """In rounds of time, the mean of twelve seeds: first where all but one are slow, last where one is killed now and then."""
    ends = []
    for profile in ("first", "spot"):
        runs = [Run("transformer", profile, 8, seed, 200, "ours", plan.ours(plan.BOTH)) for seed in range(12)]
        ends.append(mean(200 * _end_of_waits(run) / limit_of(run) for run in runs))
    assert f"({ends[0]:.0f} to {ends[1]:.0f} by the clock)" in (ROOT / "docs/method.md").read_text("utf-8")


def _end_of_waits(run: Run) -> float:
    clock = Clock(KINDS[run.profile], run.workers, run.seed, take_policy(settings_of(run)), limit_of(run))
    return next(event.time for event in clock.iterate() if clock.rounds >= run.rounds)


def test_the_reports_memories_are_of_stored_runs() -> None:
    text, losses = (ROOT / "docs/method.md").read_text(encoding="utf-8"), Losses(FINALS)
    usual, shortest = plan.OUR_MEMORIES[0], plan.OUR_MEMORIES[-1]
    alike = (f"{told(against(losses, each, '', usual))} ({each}" for each in plan.MEMORY_FOR)
    assert f"this server less DDP {'), '.join(alike)}; three seeds)" in text
    first, second, third = (told(against(losses, each, "memory=0.25", shortest)) for each in plan.MEMORY_FOR)
    assert f"{first}, {second} and {third}. " in text
    leads = [f"{told(against(losses, each, 'memory=0.25')).lstrip('+')} ({each})" for each in plan.MEMORY_FOR]
    assert f"With a quarter DDP leads this server's default by {', '.join(leads[:2])} and {leads[2]}" in text


def test_the_report_says_where_other_models_end_lower() -> None:
    text, losses = (ROOT / "docs/method.md").read_text(encoding="utf-8"), Losses(FINALS)
    others = [(model, profile, 8, 200) for model in ("convnet", *plan.UNTUNED) for profile in plan.THREE]
    higher = sum(mean(differences(losses, where)) > 0 for where in others)
    assert f"DDP's best form has the lower mean in {WORDS[higher]} of {WORDS[len(others)]} places" in text
    alone = {model: losses.best((model, "equal", 1, 200), "ours", plan.BOTH)[0] for model, *_ in others}
    at_one_workers_rate = sum(
        mean(losses.of(*where, "ours", f"rate={alone[where[0]]} {plan.BOTH}")) > best_form(losses, where)[0] for where in others
    )
    shorter = [mean(differences(losses, where, memory=plan.SHORTER)) for where in others]
    level = sum(abs(each) < 0.0005 for each in shorter)
    assert (at_one_workers_rate, level, sum(each > 0.0005 for each in shorter)) == (len(others), 1, len(others) - 1)
    assert (
        "in all nine if this server takes one worker's best rate (our advice: that or half); in eight, level in one, if DDP "
        "has a shorter memory"
    ) in text
    assert f"the lower mean in {WORDS[higher]} of {WORDS[len(others)]} places, and in all {WORDS[len(others)]} if" in README


@pytest.mark.parametrize("study", [finals, many_workers, unequal_data, tuning], ids=lambda study: study.RESULTS.name)
def test_a_page_of_results_is_drawn_from_what_is_stored(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in study.RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **settings: Path(path).touch())
    page = study.draw(tmp_path)
    assert page.read_text(encoding="utf-8") == (study.RESULTS / page.name).read_text(encoding="utf-8")


def test_the_papers_page_keeps_each_claim_with_its_verdict(tmp_path: Path) -> None:
    """Its runs are not stored: what is drawn without any is the page as it was, as long as each claim is in it."""
    shutil.copy(RESULTS / "paper/README.md", tmp_path)
    page = paper.write(tmp_path, Scale(), {name: paper.State([], 0) for name in FIGURES}, "")
    assert page.read_text(encoding="utf-8") == (RESULTS / "paper/README.md").read_text(encoding="utf-8")
