"""`gem-ctl report` from a run's files: what the page shows of complete, damaged, empty and huge histories."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from ctl.parsed_page import HOSTILE, Parsed
from gem_api.curves import BINS
from gem_api.history import COLUMNS as WRITTEN
from gem_api.history import HistoryError, Piece, read_history
from gem_ctl.cli import main
from gem_ctl.curves import COLUMNS, RunCurves
from gem_ctl.local_runs import Announcement
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import page

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")
HEADER = ",".join(WRITTEN)
BEGIN = 1_700_000_000.0
PLOTS = [
    "Loss", "Accuracy", "Commits per second", "Workers at work", "Median π of a commit", "Share of π at its bounds",
    "Energy of proxy and central variable", "Staleness", "Distribution of staleness",
]  # fmt: skip


def line(version: int, worker: str = "a", staleness: int = 0, discarded: int = 0, **changes: Any) -> str:
    """A line of a history; ten commits a second."""
    values = {"loss": 1 / version, "samples": 8, "pi_median": 0.5, "pi_zero_ratio": 0.25, "pi_max_ratio": 0.125}
    values |= {"proxy_energy": 1e-4, "central_energy": 2e-4, "unix_seconds": BEGIN + version / 10, **changes}
    name = f'"{worker.replace(chr(34), 2 * chr(34))}"' if set(worker) & set(',"') else worker
    known = {"version": version, "ticket": version, "worker": name, "sequence": 1, "discarded": discarded}
    return ",".join(str((known | {"staleness": staleness} | values)[column]) for column in WRITTEN)


def in_turn(commits: int, workers: int) -> list[str]:
    """The lines of workers of equal speed, which commit one after the other."""
    return [line(number, f"w-{(number - 1) % workers}", min(number, workers) - 1) for number in range(1, commits + 1)]


def history(path: Path, lines: list[str], end: str = "\r\n") -> Path:
    path.write_text("\r\n".join([HEADER, *lines]) + end, encoding="utf-8", newline="")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a complete run of gem-train with 3 workers and 300 commits."""
    folder = tmp_path / "runs" / "20260102-digits"
    folder.mkdir(parents=True)
    history(folder / "commits.csv", in_turn(300, 3))
    (folder / "run.json").write_text(json.dumps({"task": "digits", "workers": 3, "runs": "/secret", "learning_rate": 0.1}))
    scores = [{"version": 100, "loss": 0.5, "accuracy": 0.8}, {"version": 300, "loss": 0.25, "accuracy": 0.975}]
    (folder / "evaluations.json").write_text(json.dumps(scores))
    summary = {"outcome": "complete", "hyperparameters": {"learning_rate": 0.05}, "versions": {"gem-ps": "0.1.0"}}
    summary["commits_via"] = {"memory": 2, "tcp": 1}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def parsed(path: Path, in_progress: bool = False) -> Parsed:
    return Parsed(page(read_run(path, in_progress=in_progress), BEGIN))


def tiles(shown: Parsed) -> dict[str, str]:
    """The tiles' values by their names."""
    values = shown.of("b")
    places = [index for index, (within, _) in enumerate(shown.texts) if within == "b"]
    return {shown.texts[place + 1][1]: value for place, value in zip(places, values, strict=True)}


def ctl(*arguments: str) -> Result:
    clean = {"GEM_PROMETHEUS": None, "GEM_REPORT_RUN": None, "GEM_RUNS": None}
    return CliRunner().invoke(main, [*arguments], env=clean)


# -- what the page shows


def test_a_complete_run_shows_every_plot_the_main_numbers_settings_and_workers(run: Path) -> None:
    shown = parsed(run)
    assert shown.of("h3") == PLOTS
    assert shown.count("svg") == len(PLOTS)
    assert shown.of("h1") == ["Run 20260102-digits"]
    assert shown.of("h2") == ["Training", "Scaling factor π", "Staleness", "Workers", "Settings", "Versions"]
    found = tiles(shown)
    assert found.pop("training loss") == f"{np.mean([1 / version for version in range(251, 301)]):.4f}"
    assert found == {
        "accuracy": "97.50%", "evaluation loss": "0.2500", "commits": "300", "samples": "2,400", "commits/s": "10.0",
        "workers": "3", "commits via": "2 memory, 1 tcp", "mean staleness": "2.0", "median π": "0.500",
    }  # fmt: skip
    cells = shown.of("td")
    assert [cells[at : at + 5] for at in range(0, len(cells), 5)] == [
        ["w-0", "100", "33.3%", "2.0", "298"],
        ["w-1", "100", "33.3%", "2.0", "299"],
        ["w-2", "100", "33.3%", "2.0", "300"],
    ]
    settings = dict(zip(shown.of("dt"), shown.of("dd"), strict=True))
    assert settings == {"learning rate": "0.05", "task": "digits", "workers": "3", "gem-ps": "0.1.0"}
    assert shown.of("p")[0].startswith("complete · 2023-11-14 22:13:20 to 2023-11-14 22:13:50 UTC, 0:00:29")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [("stopped", "stopped: gem-train --resume"), ("diverged", "diverged: a worker's loss"), ("failed", "failed:")],
)
def test_the_outcome_is_told(run: Path, outcome: str, words: str) -> None:
    (run / "summary.json").write_text(json.dumps({"outcome": outcome}))
    assert parsed(run).of("p")[0].startswith(words)


def test_a_run_in_progress_is_not_called_by_the_outcome_of_its_last_interruption(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"outcome": "stopped"}))
    announcement = Announcement(run, "127.0.0.1:1")
    try:
        result = ctl("report", str(run))
        assert result.stdout == f"wrote {run / 'report.html'}: run 20260102-digits, in progress, version 300\n"
    finally:
        announcement.close()
    assert Parsed((run / "report.html").read_text(encoding="utf-8")).of("p")[0].startswith("in progress · ")


def test_a_run_that_was_killed_has_no_known_outcome(run: Path) -> None:
    (run / "summary.json").unlink()
    assert parsed(run).of("p")[0].startswith("unknown: gem-train was killed")


def test_a_damaged_file_beside_the_history_leaves_its_part_out(run: Path) -> None:
    (run / "summary.json").write_text('{"outcome": ')
    (run / "evaluations.json").write_text('[{"version": "x", "loss": 1}, 7, {"version": 3, "loss": 0.5, "accuracy": null}]')
    (run / "run.json").write_text("[]")
    shown = parsed(run)
    (note,) = shown.of("li")
    assert note.startswith("summary.json can't be read")
    assert tiles(shown)["evaluation loss"] == "0.5000"
    assert "accuracy" not in tiles(shown)


def test_a_rule_without_pi_has_no_section_about_it(tmp_path: Path) -> None:
    none: dict[str, Any] = dict.fromkeys(("pi_median", "pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy"), "")
    path = history(tmp_path / "h.csv", [line(version, **none) for version in range(1, 9)])
    shown = parsed(path)
    assert shown.of("h2") == ["Training", "Staleness", "Workers"]
    assert "median π" not in tiles(shown)


def test_a_run_with_one_commit_has_a_page(tmp_path: Path) -> None:
    shown = parsed(history(tmp_path / "h.csv", [line(1)]))
    assert shown.count("svg") == len(PLOTS) - 2, "neither an evaluation nor a rate: all else has its dot"
    assert tiles(shown)["commits"] == "1"


def test_a_run_without_commits_says_so(tmp_path: Path) -> None:
    shown = parsed(history(tmp_path / "h.csv", []))
    assert shown.of("li") == ["No commit has been applied."]
    assert shown.count("svg") == 0


def test_losses_that_are_not_finite_are_counted_and_left_out(tmp_path: Path) -> None:
    losses = [1.0, "nan", "inf", "-inf", "", 3.0]
    path = history(tmp_path / "h.csv", [line(version + 1, loss=loss) for version, loss in enumerate(losses)])
    shown = parsed(path)
    assert shown.of("li") == ["The loss of 3 commits was NaN or infinite; the plots leave it out."]
    assert tiles(shown)["training loss"] == "2.0000"


def test_commits_that_the_rule_discarded_count_apart(tmp_path: Path) -> None:
    path = history(tmp_path / "h.csv", [line(1, "a"), line(1, "b", 9, 1), line(2, "b", 1)])
    shown = parsed(path)
    assert tiles(shown) | {"commits": "2", "discarded": "1", "samples": "16", "mean staleness": "0.5"} == tiles(shown)
    assert shown.of("td") == ["a", "1", "50.0%", "0.0", "0", "1", "b", "1", "50.0%", "1.0", "1", "2"]


@pytest.mark.parametrize("name", [HOSTILE, "</td>", "a,b", '"', "$x$"])
def test_a_workers_name_is_text(tmp_path: Path, name: str) -> None:
    shown = parsed(history(tmp_path / "h.csv", [line(1, name)]))
    assert shown.of("td")[0] == name
    assert shown.count("script") == 0


# -- damaged histories


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = in_turn(20, 2)
    lines[3], lines[5], lines[7] = "garbage", ",".join("abcdefghijklmn"), '"' + lines[7]
    lines[9] = line(-5)
    lines[11] = line(12, loss=2).replace("12,", "1e300,", 1)
    shown = parsed(history(tmp_path / "h.csv", lines))
    assert shown.of("li") == ["5 damaged lines of h.csv are left out."]
    assert tiles(shown) | {"commits": "20", "samples": "120"} == tiles(shown)


def test_the_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    shown = parsed(history(tmp_path / "h.csv", [line(1), line(2)], end="\r\n3,3,17"))
    assert shown.of("li") == []
    assert tiles(shown)["commits"] == "2"


def test_a_history_of_which_the_begin_is_missing_says_so(tmp_path: Path) -> None:
    shown = parsed(history(tmp_path / "h.csv", [line(version) for version in range(50, 60)]))
    assert shown.of("li") == ["The history begins at version 50: earlier commits are not in the file."]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "its first line names no column version and worker"),
        (b"a,b\r\n1,2\r\n", "its first line names no column version and worker"),
        (bytes(range(256)) * 500, "is not a history of gem-server"),
        (f"{HEADER}\r\nx\r\ny\r\n".encode(), "none of its 2 lines is a line of a history"),
    ],
    ids=["empty", "another table", "no text", "damaged throughout"],
)
def test_what_is_no_history_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "h.csv").write_bytes(content)
    result = ctl("report", str(tmp_path / "h.csv"), str(tmp_path / "out.html"))
    assert result.exit_code == 1
    (error,) = result.stderr.splitlines()
    assert words in error
    assert not (tmp_path / "out.html").exists()


# -- which run, and where to


def test_without_arguments_it_is_the_newest_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = run.with_name("20270101-later-name")
    older.mkdir()
    for name in ("commits.csv", "run.json"):
        (older / name).write_bytes((run / name).read_bytes())
        os.utime(older / name, (BEGIN, BEGIN))
    (run.parent / "no-run").mkdir()
    monkeypatch.chdir(run.parents[1])
    result = ctl("report")
    assert (result.exit_code, result.stdout) == (
        0,
        "wrote runs/20260102-digits/report.html: run 20260102-digits, complete, version 300\n",
    )
    assert ctl("--runs", str(run.parent), "report", "-").stdout.startswith("<!doctype html>")


def test_a_history_alone_is_named_by_its_file_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server").mkdir()
    history(tmp_path / "server" / "own.csv", in_turn(10, 2))
    assert ctl("report", "server/own.csv").stdout == "wrote gem-own.html: run own, version 10\n"
    assert ctl("report", "server").stdout == "wrote server/report.html: run server, version 10\n"
    assert ctl("report", "server/own.csv", "there.html").stdout == "wrote there.html: run own, version 10\n"


def test_a_report_never_overwrites_a_history(run: Path) -> None:
    before = (run / "commits.csv").read_bytes()
    assert ctl("report", str(run / "commits.csv"), str(run / "x.html")).exit_code == 0
    assert (run / "commits.csv").read_bytes() == before


def test_a_wrong_folder_is_one_line_that_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    (started / "run.json").write_text("{}")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a.csv", "b.csv"):
        (several / name).touch()
    for arguments, words in {
        (str(tmp_path / "nowhere"),): "name a run's folder, or a file of gem-server --history",
        (str(run.parent),): "is not the folder of a run: it should hold commits.csv",
        (str(started),): "has no commits.csv yet: its server has not started",
        (str(several),): "it has several: a.csv, b.csv; name one",
        (str(run), str(tmp_path / "none" / "out.html")): "can't write the report",
    }.items():
        result = ctl("report", *arguments)
        assert result.exit_code == 1, arguments
        (error,) = result.stderr.splitlines()
        assert words in error


def test_a_run_and_prometheus_do_not_go_together(run: Path) -> None:
    result = ctl("report", str(run), "--prometheus", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert f"with --prometheus the data comes from Prometheus, not from {run}" in result.stderr


# -- curves


def pieces(commits: list[tuple[str, int, int]], size: int) -> Iterator[Piece]:
    """The commits (worker, version, staleness) in pieces of this size."""
    for at in range(0, len(commits), size):
        names, versions, staleness = zip(*commits[at : at + size], strict=True)
        version = np.array(versions, np.float64)
        columns = {name: np.full(len(names), 1.0) for name in COLUMNS}
        columns |= {"version": version, "staleness": np.array(staleness, np.float64), "loss": version, "discarded": 0 * version}
        yield Piece(list(names), columns | {"unix_seconds": BEGIN + version / 4}, 0, 0)


def condensed(commits: list[tuple[str, int, int]], size: int) -> RunCurves:
    curves = RunCurves()
    for piece in pieces(commits, size):
        curves.add_piece(piece)
    curves.end_of_history()
    return curves


def at_random(count: int, workers: int) -> list[tuple[str, int, int]]:
    """Commits of workers of which half are away in the middle third of the run."""
    generator, commits = random.Random(count), []
    last = dict.fromkeys(range(workers), 0)
    for version in range(1, count + 1):
        away = count / 3 < version < 2 * count / 3
        worker = generator.randrange(workers // 2 if away else workers)
        if version == math.ceil(2 * count / 3):
            last.update(dict.fromkeys(range(workers // 2, workers), version - 1))
        commits.append((f"w{worker}", version, version - 1 - last[worker]))
        last[worker] = version
    return commits


@pytest.mark.parametrize("count", [1, 7, BINS, BINS + 1, 5 * BINS + 3])
def test_curves_are_the_means_of_their_bins(count: int) -> None:
    """Compared with a plain loop over all commits."""
    commits = at_random(count, 6)
    curves = condensed(commits, 100)
    width = int(curves.width)
    assert BINS * width >= count > BINS * width / 2 or width == 1
    bins = [commits[at : at + width] for at in range(0, count, width)]
    assert curves.mean("loss").tolist() == pytest.approx([np.mean([one[1] for one in each]) for each in bins])
    assert curves.mean("staleness").tolist() == pytest.approx([np.mean([one[2] for one in each]) for each in bins])
    assert curves.highest_staleness(1).tolist() == [max(one[2] for one in each) for each in bins]
    assert curves.distribution.sum() == count
    assert curves.distribution[3] == sum(one[2] == 3 for one in commits)


@pytest.mark.parametrize("size", [1, 64, 10_000])
def test_workers_at_work_are_those_whose_commit_was_on_its_way(size: int) -> None:
    """Compared with counting, for each version, the workers with an interval [version − staleness, version] around it."""
    commits = at_random(1500, 8)
    curves = condensed(commits, size)
    at_work = [set[str]() for _ in range(1501)]
    final = {name: (version, staleness) for name, version, staleness in commits}
    for name, version, staleness in commits:
        for covered in range(version - staleness, version + 1):
            at_work[covered].add(name)
    for name, (version, staleness) in final.items():
        if version + 2 * (staleness + 1) >= 1500:
            for covered in range(version, 1501):
                at_work[covered].add(name)
    width = int(curves.width)
    counts = [len(names) for names in at_work[1:]]
    expected = [np.mean(counts[at : at + width]) for at in range(0, 1500, width)]
    assert curves.workers().tolist() == pytest.approx(expected)
    assert counts[750] == 4


def test_the_rate_is_that_of_the_clock() -> None:
    rates = condensed(at_random(2000, 4), 500).rates(50)
    assert rates[1:] == pytest.approx(4.0)


def test_a_clock_that_is_set_back_gives_no_rate_rather_than_a_wrong_one() -> None:
    curves = RunCurves()
    for piece in pieces(at_random(10, 2), 5):
        piece.columns["unix_seconds"][:] = BEGIN
        curves.add_piece(piece)
    assert np.isnan(curves.rates(50)).all()


def test_a_history_of_any_length_is_read_in_pieces(tmp_path: Path) -> None:
    path = history(tmp_path / "h.csv", in_turn(45_000, 3))
    lengths = [len(piece.workers) for piece in read_history(path, ["loss"])]
    assert sum(lengths) == 45_000
    assert max(lengths) <= 20_000
    curves = read_run(path, in_progress=False).curves
    assert (len(curves.positions()), curves.width, curves.applied) == (352, 128, 45_000)


def test_another_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("version\n1\n")
    with pytest.raises(HistoryError, match="no column worker"):
        next(read_history(tmp_path / "h.csv"))


@pytest.mark.parametrize("number", ["9" * 400, "1e308", "-1e300"])
def test_an_evaluation_that_no_plot_can_show_is_left_out(run: Path, number: str) -> None:
    good = '{"version": 2, "loss": 0.5, "accuracy": 0.25}'
    damaged = f'{{"version": 1, "loss": {number}, "accuracy": 1}}, {{"version": {number}, "loss": 1, "accuracy": 1}}'
    (run / "evaluations.json").write_text(f"[{damaged}, {good}]", encoding="utf-8")
    assert read_run(run, in_progress=False).evaluations == [(2.0, 0.5, 0.25)]


def test_a_setting_that_is_no_valid_text_does_not_keep_the_report_from_being_written(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"task": "\ud800"}), encoding="utf-8")
    result = ctl("report", str(run))
    assert result.exit_code == 0, result.output
    assert "<dd>?</dd>" in (run / "report.html").read_text(encoding="utf-8")


def test_a_worker_whose_name_is_an_endless_number_is_shown(tmp_path: Path) -> None:
    path = history(tmp_path / "commits.csv", [line(1, worker="9" * 5000), line(2, worker="8")])
    assert "9" * 5000 in page(read_run(path, in_progress=False), 0.0)
