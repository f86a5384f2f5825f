"""gem-ctl plan on the command line: tables, JSON, and one line for wrong usage."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from gem_ctl.amounts import bytes_per_second
from gem_ctl.cli import main

BASE = ["plan", "--parameters", "1M", "--compute-seconds", "0.3"]


def run(*options: str) -> Result:
    return CliRunner().invoke(main, [*BASE, *options])


def test_json_has_everything() -> None:
    options = ("--workers", "10,20", "--slow", "10%:5", "--json")
    done = run(*options)
    found = json.loads(done.stdout)
    assert [each["workers"] for each in found["outcomes"]] == [10, 20]
    assert found["outcomes"][0]["staleness"]["mean"] == pytest.approx(9, rel=0.02)
    assert found["scenario"]["slow"] == [{"share": 0.1, "factor": 5.0}]
    assert found["scenario"]["setup"]["parameters"] == 10**6
    assert found["plan"]["worker_bytes"] == 8 * 10**6
    assert run(*options).stdout == done.stdout, "the same seed"


def test_a_link_is_in_bits_per_second() -> None:
    done = run("--workers", "1000", "--bandwidth", "40M", "--json")  # of which TCP fills 32M: a commit of 32 Mbit a second
    assert json.loads(done.stdout)["outcomes"][0]["commits_per_second"] == pytest.approx(1.0, rel=0.02)
    assert {bytes_per_second(same) for same in ("40M", "40Mbit", "40m", "40Mbps", "40Mbit/s", "40000000")} == {5e6}


def test_each_number_of_workers_has_one_line_in_order() -> None:
    lines = run("--workers", "20,3,20").stdout.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["3", "20"]


def test_the_length_of_the_run_says_how_long_it_takes_and_for_how_many_workers_it_is_enough() -> None:
    done = run("--workers", "1,10", "--batches", "2000")
    assert "long enough    for 20 workers; with more, each has fewer than 100 batches" in done.stdout
    lines = [line.split()[-2:] for line in done.stdout.split("\n\n")[1].splitlines()[1:]]
    assert [each for each, _ in lines] == ["2,000", "200"]
    hours, minutes, seconds = map(int, lines[0][1].split(":"))
    assert 3600 * hours + 60 * minutes + seconds == pytest.approx(2000 * 0.306, rel=0.02), "with the commit itself"
    assert "takes" not in run("--workers", "1").stdout


def test_a_share_of_the_workers_that_is_none_is_said() -> None:
    done = run("--workers", "4,50", "--slow", "10%:5")
    assert "note: 10 % of 4 are none: nobody computes 5 times as long" in done.stdout
    assert "of 50 are none" not in done.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--workers", "0"], "not numbers of workers from 1 to 1,000,000"),
        (["--workers", "10,,20"], "not numbers of workers"),
        (["--workers", "2M"], "write 100 or 10,100,1k"),
        (["--workers", "1.5"], "not numbers of workers"),
        (["--slow", "10:5"], "write 10%:5"),
        (["--slow", "110%:5"], "is not a share of the workers"),
        (["--slow", "10%:0.5"], "a factor from 1 to 1000"),
        (["--slow", "60%:5", "--slow", "60%:2"], "more than 100 % together"),
        (["--bandwidth", "fast"], "write 10G or 100M"),
        (["--compute-seconds", "300ms"], "'300ms' is not a valid number"),
        (["--compute-seconds", "1e308"], "is not in the range"),
        (["--shared-memory", "--rtt", "0.1"], "shared memory has no network"),
        (["--spread", "nan"], "is not a finite number"),
        (["--optimizer", "adamw", "--rule", "dcasgd"], "works with --rule gem, downpour, adaptive"),
        (["--workers", "9" * 400], "not numbers of workers"),
        *((["--parameters", size], "not a number of parameters") for size in ("0", "x", "-5", "1e3", "25q", "2000T", "")),
        (["--optimizer", "adamw", "--local-steps", "8"], "use --optimizer sgd or worker"),
    ],
)
def test_wrong_usage_gets_one_clear_line(options: list[str], why: str) -> None:
    done = run(*options)
    assert done.exit_code == 2
    assert why in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("options", "fixed", "each"),
    [((), 1, 2), (("--optimizer", "adamw", "--overlap"), 3, 2)],
)
def test_the_copies_of_a_checkpoint_are_planned_apart(options: tuple[str, ...], fixed: int, each: int) -> None:
    found = json.loads(run(*options, "--json").stdout)["plan"]
    assert (found["checkpoint_fixed_bytes"], found["checkpoint_worker_bytes"]) == (fixed * 4_000_000, each * 4_000_000)
    (line,) = [line for line in run(*options).stdout.splitlines() if line.startswith("checkpoint ")]
    assert line.split(maxsplit=1)[1].startswith("up to")
