"""`gem-ctl report`: the file that it writes, or one line that says why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ctl.fake_prometheus import BEGIN, NOW, FakePrometheus
from gem_ctl.cli import main

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments], env={"GEM_PROMETHEUS": None, "GEM_REPORT_RUN": None})


@pytest.fixture
def fresh(fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch) -> FakePrometheus:
    """A Prometheus that knows two runs of the last hour."""
    monkeypatch.setattr("gem_ctl.report_command.time.time", lambda: NOW)
    fake.has_run("older", seconds=500)
    fake.has_run("newer", begin=BEGIN + 600)
    return fake


def test_the_report_is_named_after_its_run(fresh: FakePrometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = ctl("--prometheus", fresh.url)
    assert (result.exit_code, result.stdout) == (0, "wrote gem-newer.html: run newer, 0:10:00\n")
    assert "Run newer" in (tmp_path / "gem-newer.html").read_text(encoding="utf-8")


def test_the_report_goes_where_it_is_told(fresh: FakePrometheus, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = ctl(str(out), "--prometheus", fresh.url, "--run", "older")
    assert (result.exit_code, result.stdout) == (0, f"wrote {out}: run older, 0:08:20\n")
    assert "Run older" in out.read_text(encoding="utf-8")


def test_a_report_that_can_not_be_made_is_one_line_and_leaves_no_file(fresh: FakePrometheus, tmp_path: Path) -> None:
    for arguments, words in {
        ("--prometheus", "nonsense"): "write http://HOST:9090",
        ("--prometheus", "http://127.0.0.1:1"): "is its address right (--prometheus)?",
        ("--prometheus", fresh.url, "--run", "strange"): "only newer, older",
        ("--prometheus", fresh.url, "--last", "0.1"): "Does it scrape gem-server?",
    }.items():
        result = ctl(str(tmp_path / "out.html"), *arguments)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert words in line
        assert list(tmp_path.iterdir()) == []


def test_a_report_that_breaks_off_leaves_the_one_before_it(fresh: FakePrometheus, tmp_path: Path) -> None:
    fresh.targets = None
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("old")
    assert (ctl(str(old), "--prometheus", fresh.url).exit_code, old.read_text()) == (1, "old")
    assert ctl(str(new), "--prometheus", fresh.url).exit_code == 1
    assert not new.exists()


def test_the_report_may_go_to_standard_output(fresh: FakePrometheus) -> None:
    result = ctl("-", "--prometheus", fresh.url)
    assert result.exit_code == 0
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.endswith("</html>\n")
    assert result.stderr == "wrote -: run newer, 0:10:00\n"


def test_a_report_that_can_not_be_written_is_one_line(fresh: FakePrometheus, tmp_path: Path) -> None:
    result = ctl(str(tmp_path / "nowhere" / "out.html"), "--prometheus", fresh.url)
    assert result.exit_code == 1
    assert "can't write the report" in result.stderr


def test_a_run_with_an_odd_name_gets_a_file_in_this_folder(
    fake: FakePrometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can be scraped can call a run what he likes."""
    monkeypatch.setattr("gem_ctl.report_command.time.time", lambda: NOW)
    monkeypatch.chdir(tmp_path)
    fake.has_run("/../out/of/here")
    result = ctl("--prometheus", fake.url)
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("gem-*.html"))) == 1


def test_without_a_run_nobody_is_asked_but_the_user(tmp_path: Path) -> None:
    """A Prometheus that nobody named may be another run's."""
    result = CliRunner().invoke(main, ["--runs", str(tmp_path), "report"], env={"GEM_PROMETHEUS": None, "GEM_REPORT_RUN": None})
    assert result.exit_code == 2
    assert f"there is no run of gem-train in {tmp_path}: name a run's folder" in result.stderr
