"""gem-ctl simulate on the command line: tables, JSON, plots, and one line for wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gem_ctl.cli import main
from gem_ctl.plan import Setup, plan
from matplotlib.figure import Figure

BASE = ["simulate", "--parameters", "1M", "--compute-seconds", "0.3"]


def run(*options: str) -> Result:
    return CliRunner().invoke(main, [*BASE, *options])


def test_the_table_has_a_line_for_each_number_of_workers() -> None:
    done = run("--workers", "10,100,1k")
    assert done.exit_code == 0, done.output
    head, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["workers", "commits/s", "by"]
    assert [row.split()[0] for row in rows] == ["10", "100", "1,000"]
    full = plan(Setup(parameters=10**6, workers=1000, compute_seconds=0.3))
    assert rows[2].split()[1:3] == [f"{full.commits_per_second:.4g}"] * 2
    assert rows[2].split()[5] == "999.0", "the mean staleness"
    assert rows[2].endswith("11.31 GiB")
    assert "saturated by 61 workers; 57.8 by the closed form" in done.stdout


def test_mixed_speeds_have_a_line_each() -> None:
    table = run("--workers", "10", "--slow", "20%:5", "--slow", "10%:2.5").stdout.split("\n\n")[1]
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [["7", "×", "1"], ["2", "×", "5"], ["1", "×", "2.5"]]


def test_a_group_without_a_commit_has_dashes_and_a_note() -> None:
    done = run("--workers", "1000", "--slow", "0.1%:1000", "--commits", "1000")
    assert done.stdout.splitlines()[5].split() == ["1", "×", "1000", "0", *"–––––"]
    assert "note: too short for 1,000 workers, as the slowest made fewer than two commits: raise --commits" in done.stdout


def test_the_servers_that_are_needed_are_a_table() -> None:
    table = run("--workers", "100,1000,10000", "--server-memory", "64G", "--server-load", "0.9").stdout.split("\n\n")[1]
    head, *rows = table.splitlines()
    assert head.split("  ")[-1] == "servers busy 90 % at most"
    assert rows[0].split()[:2] == ["100", "1"]
    assert rows[2].split() == ["10,000", "2", "none", "is", "enough"]


def test_json_has_everything() -> None:
    options = ("--workers", "10,20", "--slow", "10%:5", "--server-load", "0.5", "--json")
    done = run(*options)
    found = json.loads(done.stdout)
    assert [each["workers"] for each in found["outcomes"]] == [10, 20]
    assert found["outcomes"][0]["staleness"]["mean"] == pytest.approx(9, rel=0.02)
    assert found["scenario"]["slow"] == [{"share": 0.1, "factor": 5.0}]
    assert found["scenario"]["setup"]["parameters"] == 10**6
    assert found["needs"][0]["servers_for_load"] >= 1
    assert run(*options).stdout == done.stdout, "the same seed"
    assert run(*options, "--seed", "1").stdout != done.stdout


def test_a_link_is_in_bits_per_second() -> None:
    done = run("--workers", "1000", "--bandwidth", "32M", "--json")
    assert json.loads(done.stdout)["outcomes"][0]["commits_per_second"] == pytest.approx(1.0, rel=0.02)
    for same in ("32Mbit", "32m", "32Mbps", "32Mbit/s", "32000000"):
        assert run("--workers", "1000", "--bandwidth", same, "--json").stdout == done.stdout


def test_costs_may_be_ones_own_for_plan_too() -> None:
    costs = ["--commit-seconds", "0.01", "--parameter-seconds", "1e-8", "--byte-seconds", "0"]
    assert json.loads(run("--workers", "1000", *costs, "--json").stdout)["outcomes"][0]["commits_per_second"] == pytest.approx(
        50
    )
    planned = CliRunner().invoke(main, ["plan", "--parameters", "1M", "--workers", "1000", *costs])
    assert "50/s, 20 ms of the server's time each" in planned.stdout


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
@pytest.mark.parametrize("workers", ["10", "1,10,100"])
def test_a_plot_is_written_as_its_name_ends(tmp_path: Path, name: str, begins: bytes, workers: str) -> None:
    path = tmp_path / name
    done = run("--workers", workers, "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert f"wrote {path}" in done.stderr
    content = path.read_bytes()
    assert content.startswith(begins)
    run("--workers", workers, "--plot", str(path))
    assert path.read_bytes() == content


def test_a_plot_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    done = run("--workers", "1", "--plot", str(tmp_path / f"{'a' * 300}.png"))
    assert done.exit_code == 1
    assert "Error: can't write" in done.stderr.splitlines()[-1]


def test_a_plot_of_one_rate_has_an_axis_that_shows_no_rounding_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    run("--workers", "100,200,400", "--plot", str(tmp_path / "a.png"))  # all beyond saturation
    low, high = drawn[0].axes[0].get_ylim()
    assert high > 2 * low


def test_each_number_of_workers_has_one_line_in_order() -> None:
    lines = run("--workers", "20,3,20").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["3", "20"]
    assert not lines[3]


def test_a_share_of_the_workers_that_is_none_is_said() -> None:
    done = run("--workers", "4,50", "--slow", "10%:5")
    assert "note: 10 % of 4 are none: nobody computes 5 times as long" in done.stdout
    assert "of 50 are none" not in done.stdout


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gem_ctl.simulation.plot", None)
    done = run("--workers", "1", "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 1
    assert "plots need Matplotlib" in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--workers", "0"], "not numbers of workers from 1 to 1,000,000"),
        (["--workers", "10,,20"], "not numbers of workers"),
        (["--workers", "many"], "write 100 or 10,100,1k"),
        (["--workers", "2M"], "not numbers of workers"),
        (["--workers", "1.5"], "not numbers of workers"),
        (["--slow", "10:5"], "write 10%:5"),
        (["--slow", "110%:5"], "is not a share of the workers"),
        (["--slow", "10%:0.5"], "a factor from 1 to 1000"),
        (["--slow", "60%:5", "--slow", "60%:2"], "more than 100 % together"),
        (["--bandwidth", "fast"], "write 10G or 100M"),
        (["--bandwidth", "bit"], "write 10G or 100M"),
        (["--plot", "plot.jpeg"], "does not end in .png, .svg, .pdf"),
        (["--plot", "none/plot.png"], "there is no folder none"),
        (["--compute-seconds", "300ms"], "'300ms' is not a valid number"),
        (["--compute-seconds", "1e308"], "is not in the range"),
        (["--shared-memory", "--latency", "0.1"], "shared memory has no network"),
        (["--spread", "nan"], "is not a finite number"),
        (["--commit-seconds", "0"], "is not in the range"),
        (["--servers", "2", "--rule", "fedbuff"], "needs one server"),
        (["--server-load", "0.9", "--shared-memory"], "--shared-memory does not reach"),
        (["--optimizer", "adamw", "--local-steps", "8"], "use --optimizer sgd or worker"),
    ],
)
def test_wrong_usage_gets_one_clear_line(options: list[str], why: str) -> None:
    done = run(*options)
    assert done.exit_code == 2
    assert why in " ".join(done.stderr.split())
