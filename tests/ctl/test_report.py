"""`gem-ctl report`: what the page shows of complete, odd and damaged runs, and what the command prints.

The pages and the command's lines are golden files in `golden/`: see `kit.golden`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ctl.report_pages import BEGIN, Parsed, as_text, complete_run, history, in_turn, line, parsed, write_json
from gem_ctl.cli import main
from gem_ctl.local_runs import Announcement
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import page
from kit import golden

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")
GOLDEN = Path(__file__).parent / "golden"
SCRIPT = files("gem_ctl").joinpath("report.js").read_text(encoding="utf-8")
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


def test_a_run_in_progress_is_not_called_by_the_outcome_of_its_last_interruption(run: Path) -> None:
    write_json(run, summary={"outcome": "stopped"})
    announcement = Announcement(run, "127.0.0.1:1")
    try:
        result = ctl("report", str(run))
        assert result.stdout == f"wrote {run / 'report.html'}: run 20260102-digits, in progress, version 300\n"
    finally:
        announcement.close()
    assert Parsed((run / "report.html").read_text(encoding="utf-8")).of("p")[0].startswith("in progress · ")


@pytest.mark.parametrize("number", ["9" * 400, "1e308", "-1e300"])
def test_an_evaluation_that_no_plot_can_show_is_left_out(run: Path, number: str) -> None:
    good = '{"version": 2, "loss": 0.5, "accuracy": 0.25}'
    damaged = f'{{"version": 1, "loss": {number}, "accuracy": 1}}, {{"version": {number}, "loss": 1, "accuracy": 1}}'
    (run / "evaluations.json").write_text(f"[{damaged}, {good}]", encoding="utf-8")
    assert read_run(run, in_progress=False).evaluations == [(2.0, 0.5, 0.25)]


def test_a_worker_whose_name_is_an_endless_number_is_shown(tmp_path: Path) -> None:
    path = history(tmp_path / "commits.csv", [line(1, worker="9" * 5000), line(2, worker="8")])
    assert "9" * 5000 in page(read_run(path, in_progress=False), 0.0)


@pytest.mark.parametrize(("on", "shown"), [("local", []), ("ray", ["ray address", "resources"])])
def test_settings_of_ray_are_shown_of_a_run_on_ray_alone(on: str, shown: list[str], run: Path) -> None:
    options = json.loads((run / "run.json").read_text())
    write_json(run, run={**options, "on": on})
    assert [name for name in parsed(run).of("dt") if name in ("ray address", "resources", "working dir")] == shown


def test_a_history_within_the_folder_of_a_run_has_the_name_of_the_run(run: Path) -> None:
    assert parsed(run / "commits.csv").of("h1") == ["Run 20260102-digits"]


def test_each_plot_is_an_image_that_says_its_values_and_holds_them_for_the_script(run: Path) -> None:
    plots = [attributes for tag, attributes in parsed(run).elements if tag == "svg"]
    assert len(plots) == 9
    assert {plot["role"] for plot in plots} == {"img"}
    assert plots[1]["aria-label"] == "Accuracy. accuracy: from 80.0% to 97.5%"
    assert plots[8]["aria-label"] == "Distribution of staleness: most often 2, in 99.3% of the commits"
    assert json.loads(plots[1]["data-points"])["lines"] == [["accuracy", [100, 300], [0.8, 0.975]]]


def test_the_colours_of_a_plot_are_those_of_the_page(run: Path) -> None:
    """They are dark on white and light on black."""
    shown = parsed(run)
    (style,) = shown.of("style")
    values = [
        value for _, attributes in shown.elements for name, value in attributes.items() if name in ("style", "fill", "stroke")
    ]
    named = {name for value in values for name in re.findall(r"var\((--\w+)\)", value)}
    assert named == {"--one", "--two", "--quiet", "--line"}
    assert not [value for value in values if re.search(r"#[0-9a-fA-F]|rgb|black|white", value)]
    assert all(style.count(f" {name}: #") == 2 for name in named), "a colour each for light and dark"


# -- safe to open


@pytest.mark.parametrize(
    "name", [HOSTILE, "</td>", "</style><img src=x onerror=alert(1)>", "a,b", '"', "<!--", "&lt;", "π 漢 🙂"]
)
def test_names_are_text_wherever_they_come_from(tmp_path: Path, name: str) -> None:
    folder = complete_run(tmp_path / "run")
    history(folder / "commits.csv", [line(1, name)])
    write_json(folder, run={"task": name}, summary={"outcome": name, "versions": {"gem-ps": name}})
    shown = parsed(folder)
    assert harmful(shown) == []
    assert shown.of("td")[0] == name
    assert shown.of("dd") == [name, name]
    assert shown.of("p")[0].startswith(name)


LOADING = {"src", "href", "xlink:href", "srcset", "data", "poster", "action", "formaction", "background", "ping", "cite"}
ACTIVE = {"iframe", "frame", "object", "embed", "base", "form", "link", "audio", "video", "img"}


def harmful(shown: Parsed) -> list[str]:
    """What in a page would have a browser load or run anything but the report's own script."""
    own = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    (policy,) = [attributes["content"] for _, attributes in shown.elements if "http-equiv" in attributes]
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{own}'; ")
    assert "".join(shown.of("script")) == SCRIPT
    wrong = [f"<{tag}>" for tag, _ in shown.elements if tag in ACTIVE]
    for tag, attributes in shown.elements:
        for name, value in attributes.items():
            if name.startswith("on") or (name in LOADING and not value.startswith("#")):
                wrong.append(f"<{tag} {name}={value[:80]!r}>")
            wrong += [f"{name}: {url}" for url in re.findall(r"url\(\s*['\"]?(?!#)[^)]*", value)]
    for style in shown.of("style"):
        wrong += re.findall(r"@import|url\([^)]*|expression\(|</", style)
    return wrong


def test_its_script_writes_text_alone_and_asks_for_nothing() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function|fetch|import|XMLHttp", SCRIPT)


def test_a_page_needs_nothing_but_itself_and_each_plot_its_own_parts(run: Path) -> None:
    """All plots share one page: a clip path of one must not be that of another."""
    shown = parsed(run)
    assert harmful(shown) == []
    values = [value for _, attributes in shown.elements for value in attributes.values()]
    wanted = {name for value in values for name in re.findall(r"url\(#([\w-]+)\)", value)}
    wanted |= {attributes["xlink:href"][1:] for tag, attributes in shown.elements if tag == "use"}
    ids = [attributes.get("id") for _, attributes in shown.elements]
    assert wanted
    assert {name: ids.count(name) for name in wanted} == dict.fromkeys(wanted, 1)


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


def test_a_report_never_overwrites_a_history(run: Path) -> None:
    before = (run / "commits.csv").read_bytes()
    assert ctl("report", str(run / "commits.csv"), str(run / "x.html")).exit_code == 0
    assert (run / "commits.csv").read_bytes() == before


def test_a_setting_that_is_no_valid_text_does_not_keep_the_report_from_being_written(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"task": "\ud800"}), encoding="utf-8")
    result = ctl("report", str(run))
    assert result.exit_code == 0, result.output
    assert "<dd>?</dd>" in (run / "report.html").read_text(encoding="utf-8")
