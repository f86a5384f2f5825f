"""`gem-ctl report`: what the page shows of complete, odd and damaged runs, and what the command prints.

What the pages show and the command's lines are golden files in `golden/`: see `kit.golden`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from ctl.report_pages import BEGIN, as_text, complete_run, history, in_turn, line, shown_of, write_json
from gem_api.curves import BINS
from gem_api.history import Piece, read_history
from gem_api.run_page import live_page
from gem_ctl.cli import main
from gem_ctl.local_runs import Announcement
from gem_ctl.recorded_commits import RecordedCommits, read_commits
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import page, shown
from kit import golden

# A warning of NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")
GOLDEN = Path(__file__).parent / "golden"
HOSTILE = """<script>alert("1")</script> 'it''s' & a\\b\\ [x].*+?|(y) {z} $"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return complete_run(tmp_path / "runs" / "20260102-digits")


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments], env={"GEM_RUNS": None})


# -- what the page shows


def killed(folder: Path) -> Path:
    (complete_run(folder) / "summary.json").unlink()
    return folder


def damaged_beside_the_history(folder: Path) -> Path:
    complete_run(folder)
    (folder / "summary.json").write_text('{"outcome": ')
    scores = [{"version": "x", "loss": 1}, 7, {"version": 3, "loss": 0.5, "accuracy": None}]
    scores += [{"version": 4, "loss": loss, "accuracy": 1} for loss in (10**400, 1e308, -1e300)]
    write_json(folder, run=[], evaluations=scores)
    return folder


def diverged_without_pi(folder: Path) -> Path:
    """A rule without π, whose run diverged; its history begins late, and losses are missing or not finite."""
    complete_run(folder)
    none: dict[str, Any] = dict.fromkeys(("pi_median", "pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy"), "")
    losses = [1.0, "nan", "inf", "-inf", "", 3.0]
    history(folder / "commits.csv", [line(50 + number, loss=loss, **none) for number, loss in enumerate(losses)])
    write_json(folder, summary={"outcome": "diverged"})
    return folder


def damaged_with_discarded(folder: Path) -> Path:
    """A history alone, with damaged lines, commits that the rule discarded, and a line that is being written."""
    folder.mkdir()
    lines = [*in_turn(20, 2), line(20, "w-0", 9, 1), line(20, "w-late", 12, 1)]
    lines[3], lines[5], lines[7] = "garbage", ",".join("abcdefghijklmn"), '"' + lines[7]
    lines[9] = line(-5)
    lines[11] = line(12, loss=2).replace("12,", "1e300,", 1)
    return history(folder / "own.csv", lines, end="\r\n21,21,w-")


def one_commit(folder: Path) -> Path:
    folder.mkdir()
    return history(folder / "one.csv", [line(1)])


def no_commit(folder: Path) -> Path:
    folder.mkdir()
    return history(folder / "none.csv", [])


CASES: list[Callable[[Path], Path]] = [
    complete_run, killed, damaged_beside_the_history, diverged_without_pi, damaged_with_discarded, one_commit, no_commit,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_page_shows_the_run(case: Callable[[Path], Path], tmp_path: Path) -> None:
    golden.check(GOLDEN / f"report_{case.__name__}.txt", as_text(case(tmp_path / "20260102-digits")))


def test_a_slow_worker_with_smaller_batches_shows_in_what_it_brought(run: Path) -> None:
    """It makes as many commits as the others."""
    lines = [line(2 * n + 1, "fast", samples=16) for n in range(30)] + [line(2 * n + 2, "slow", samples=4) for n in range(30)]
    history(run / "commits.csv", lines)
    report = shown_of(run)
    assert report["columns"][:4] == ["worker", "commits", "batches", "of all batches"]
    assert [row[:4] for row in report["workers"]] == [("fast", "30", "30.0", "80.0 %"), ("slow", "30", "7.5", "20.0 %")]


@pytest.mark.parametrize("size", ["16", 0, None, -1])
def test_without_a_batch_size_the_report_tells_samples(size: Any, run: Path) -> None:
    write_json(run, summary={"outcome": "complete", "hyperparameters": {"batch_size": size}})
    report = shown_of(run)
    assert report["columns"][:4] == ["worker", "commits", "samples", "of all samples"]
    assert report["workers"][0][:4] == ("w-0", "100", "800", "33.3 %")


def test_a_run_in_progress_is_not_called_by_the_outcome_of_its_last_interruption(run: Path) -> None:
    write_json(run, summary={"outcome": "stopped"})
    announcement = Announcement(run, "127.0.0.1:1")
    try:
        result = ctl("report", str(run))
        assert result.stdout == f"wrote {run / 'report.html'}: run 20260102-digits, in progress, version 300\n"
    finally:
        announcement.close()
    assert inlined((run / "report.html").read_text(encoding="utf-8"))["outcome"].startswith("in progress · ")


def test_a_worker_whose_name_is_an_endless_number_is_shown(tmp_path: Path) -> None:
    path = history(tmp_path / "commits.csv", [line(1, worker="9" * 5000), line(2, worker="8")])
    assert {worker[0] for worker in shown_of(path)["workers"]} == {"8", "9" * 5000}


@pytest.mark.parametrize(("on", "shown"), [("local", []), ("ray", ["ray address", "resources"])])
def test_settings_of_ray_are_shown_of_a_run_on_ray_alone(on: str, shown: list[str], run: Path) -> None:
    options = json.loads((run / "run.json").read_text())
    write_json(run, run={**options, "on": on})
    names = [name for name, _ in shown_of(run)["lists"]["Settings"]]
    assert [name for name in names if name in ("ray address", "resources", "working dir")] == shown


def test_a_history_within_the_folder_of_a_run_has_the_name_of_the_run(run: Path) -> None:
    assert shown_of(run / "commits.csv")["name"] == "20260102-digits"


def test_a_history_alone_has_the_evaluations_that_the_server_kept(tmp_path: Path) -> None:
    path = history(tmp_path / "own.csv", in_turn(20, 2))
    (tmp_path / "own.evaluations.json").write_text('[{"version": 20, "loss": 0.5, "accuracy": 0.75}]')
    assert dict(shown_of(path)["facts"])["Accuracy"] == "75.00 %"


def test_an_evaluation_is_at_the_time_of_its_version(run: Path) -> None:
    curves = shown_of(run)["curves"]
    found = [(seconds, accuracy) for seconds, accuracy in zip(curves["seconds"], curves["accuracy"], strict=True) if accuracy]
    assert found == [(pytest.approx(9.9, abs=0.3), 0.8), (pytest.approx(29.9, abs=0.3), 0.975)]


@pytest.mark.parametrize("size", [7, 5000])
def test_the_totals_are_those_of_a_plain_loop(size: int, tmp_path: Path) -> None:
    chance = random.Random(size)
    each = [(version, f"w{chance.randrange(5)}", chance.randrange(9), int(chance.random() < 0.3)) for version in range(1, 900)]
    path = history(tmp_path / "h.csv", [line(*commit) for commit in each])
    commits, (piece,) = RecordedCommits(), read_history(path)
    for at in range(0, len(each), size):
        part = slice(at, at + size)
        commits.add(Piece(piece.workers[part], {name: column[part] for name, column in piece.columns.items()}, 0, 0))
    assert (commits.applied, commits.discarded) == (sum(not one[3] for one in each), sum(one[3] for one in each))
    assert commits.mean("staleness") == pytest.approx(np.mean([one[2] for one in each]))
    assert commits.distribution[:9].tolist() == [sum(one[2] == tau and not one[3] for one in each) for tau in range(9)]
    totals = commits.per_worker
    for number, name in enumerate(commits.names):
        own = [one for one in each if one[1] == name]
        assert totals.commits[number] == sum(not one[3] for one in own)
        assert totals.samples[number] == 8 * totals.commits[number]
        assert totals.staleness[number] == sum(one[2] for one in own if not one[3])
        assert totals.last[number] == own[-1][0]


def test_in_a_pause_nobody_is_at_work_and_those_who_do_not_come_back_are_not_either(tmp_path: Path) -> None:
    """Three workers commit in turns; an hour after commit 90 one goes on alone."""
    lines = [line(n, "abc"[n % 3], 2, unix_seconds=BEGIN + n) for n in range(1, 91)]
    lines += [line(n, "a", 0, unix_seconds=BEGIN + 3600 + n) for n in range(91, 121)]
    columns = read_commits(history(tmp_path / "h.csv", lines)).timeline.columns()
    found = list(zip(*(columns[name] for name in ("seconds", "workers", "commits_per_second")), strict=True))
    assert {workers for second, workers, _ in found if 10 < second < 88} == {3}
    assert {(workers, rate) for second, workers, rate in found if 92 < second < 146} == {(0, 0)}
    assert {workers for second, workers, _ in found if second > 150} == {1}


def test_workers_at_work_are_those_whose_last_commit_is_not_long_ago(tmp_path: Path) -> None:
    """Three workers commit in turns. One is away from commit 101 to 200."""
    names = ["abc"[n % 3] if not 100 < n <= 200 else "ab"[n % 2] for n in range(1, 301)]
    path = history(tmp_path / "h.csv", [line(n, name, 2) for n, name in enumerate(names, 1)])
    workers = dict(zip(*(read_commits(path).timeline.columns()[name] for name in ("version", "workers")), strict=True))
    assert {count for version, count in workers.items() if 3 <= version <= 100 or version > 203} == {3}
    assert {count for version, count in workers.items() if 120 <= version <= 200} == {2}


def test_a_history_of_any_length_is_read_in_pieces(tmp_path: Path) -> None:
    path = history(tmp_path / "h.csv", in_turn(9_000, 103))
    assert max(len(piece.workers) for piece in read_history(path, ["loss"])) < 5_000
    commits = read_commits(path)
    assert (commits.applied, commits.final) == (9_000, 9_000)
    report = shown(read_run(path, in_progress=False, commits=commits), BEGIN)
    assert (len(report["workers"]), report["more"]) == (100, "and 3 more")
    assert all(len(column) <= BINS + 1 for column in report["curves"].values())


# -- safe to open


def inlined(report: str) -> Any:
    """The data in a report."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', report)
    return json.loads(data)


@pytest.mark.parametrize(
    "name", [HOSTILE, "</td>", "</script><img src=x onerror=alert(1)>", "a,b", '"', "<!--", "&lt;", "π 漢 🙂"]
)
def test_names_are_data_wherever_they_come_from(tmp_path: Path, name: str) -> None:
    """But for its data and its policy, a report is the live page, byte for byte: a name can't become a part of it."""
    folder = complete_run(tmp_path / "run")
    history(folder / "commits.csv", [line(1, name)])
    write_json(folder, run={"task": name}, summary={"outcome": name, "versions": {"gem-ps": name}})
    report = page(read_run(folder, in_progress=False), BEGIN)
    data = inlined(report)
    assert data["workers"][0][0] == name
    assert data["lists"] == {"Settings": [["task", name]], "Versions": [["gem-ps", name]]}
    assert data["outcome"].startswith(name)
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n', "", re.sub(r'(id="data">)[^<>&]*<', r"\1<", report))
    assert bare == live_page()


def test_a_report_may_run_its_own_script_and_load_nothing(run: Path) -> None:
    report = page(read_run(run, in_progress=False), BEGIN)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', report)
    allowed = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", report, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert allowed == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


# -- the command


def test_the_command_says_what_it_wrote_or_in_one_line_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    older = complete_run(Path("runs/20270101-later-name"))
    for name in ("commits.csv", "run.json"):
        os.utime(older / name, (BEGIN, BEGIN))
    complete_run(Path("runs/20260102-digits"))
    for folder in ("server", "several", "started", "no-history", "empty", "runs/no-run"):
        Path(folder).mkdir()
    history(Path("server/own.csv"), in_turn(10, 2))
    history(Path("server/odd name$.csv"), in_turn(10, 2))
    write_json(Path("started"), run={})
    Path("several/a.csv").touch()
    Path("several/b.csv").touch()
    for name, content in {
        "empty": b"",
        "another-table": b"a,b\r\n1,2\r\n",
        "no-text": bytes(range(256)) * 500,
        "damaged": Path("server/own.csv").read_bytes().partition(b"\r\n")[0] + b"\r\nx\r\ny\r\n",
    }.items():
        Path("no-history", f"{name}.csv").write_bytes(content)
    asked = """
        report | report runs/20270101-later-name | report there.html
        report server/own.csv | report server
        rm server/own.csv | report server
        --runs empty report | report nowhere | report runs | report started | report several
        report runs/20260102-digits none/out.html | report runs/20260102-digits --prometheus http://localhost:9090
        report no-history/empty.csv | report no-history/another-table.csv | report no-history/no-text.csv out.html
        report no-history/damaged.csv out.html
    """
    lines = []
    for command in (part.strip() for row in asked.strip().splitlines() for part in row.split("|")):
        if command.startswith("rm "):
            Path(command[3:]).unlink()
            continue
        result = ctl(*command.split())
        lines += [f"$ gem-ctl {command}", result.output.rstrip(), f"exit status {result.exit_code}", ""]
    text = re.sub(r"'/[^']*/none/[^']*'", "'/.../none/out.html'", "\n".join(lines))  # what is written first has another name
    golden.check(GOLDEN / "report_command.txt", text)
    assert not Path("out.html").exists()


def test_a_report_to_standard_output_is_the_page_alone(run: Path) -> None:
    result = ctl("report", str(run), "-")
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.endswith("</html>\n")
    assert result.stderr == "wrote -: run 20260102-digits, complete, version 300\n"


def test_a_report_that_can_not_be_made_leaves_the_one_before_it(run: Path) -> None:
    assert ctl("report", str(run)).exit_code == 0
    before = (run / "report.html").read_bytes()
    (run / "commits.csv").write_text("a,b\r\n1,2\r\n")
    assert ctl("report", str(run)).exit_code == 1
    assert (run / "report.html").read_bytes() == before


def test_a_setting_that_is_no_valid_text_does_not_keep_the_report_from_being_written(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"task": "\ud800"}), encoding="utf-8")
    result = ctl("report", str(run))
    assert result.exit_code == 0, result.output
    assert inlined((run / "report.html").read_text(encoding="utf-8"))["lists"]["Settings"][-1] == ["task", "\ud800"]
