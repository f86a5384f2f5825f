"""Programs of others: what their descriptions say, which sources are missing, and the table. No source is needed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.lib.launch import RunFailed
from benchmarks.ported import __main__ as command
from benchmarks.ported.page import HEADS, apart, gain, noise, ported_table
from benchmarks.ported.program import Program, changed_lines, load, names
from benchmarks.ported.reduced import Dealt
from benchmarks.ported.runs import KINDS, NOISE, Outcome, Run
from benchmarks.ported.sources import find

DIFF = "--- a/x.py\n+++ b/x.py\n@@ -1,0 +2 @@\n+import y\n@@ -7,2 +9 @@\n--- x\n-\n+++ y\n\\ No newline at end of file\n"
PROGRAM = Program(
    "p", "a net", "https://example.org/owner/name", "0" * 40, "a/main.py", loss=r"loss (\S+)", quality=r"right (\S+)",
    metric="right", licence="MIT", arguments="--epochs 3", kinds={"three": {"arguments": "--epochs 1"}},
)  # fmt: skip


def test_changed_lines_are_those_removed_and_added_and_not_the_names_of_files() -> None:
    assert changed_lines(DIFF) == 4
    assert changed_lines(DIFF + DIFF) == 8


@pytest.mark.parametrize("name", names())
def test_every_program_is_described_and_few_of_its_lines_change(name: str) -> None:
    program = load(name)
    assert set(program.kinds) <= set(KINDS)
    assert len(program.commit) == 40
    assert 0 < program.lines <= 20
    assert all("127.0.0.1:" in (program.folder / "port.diff").read_text() for _ in range(program.servers))
    for diff in program.folder.glob("*.diff"):
        assert not [line for line in diff.read_text().splitlines() if line.startswith(" ")], "a line of context: diff -U0"


def test_what_a_kind_of_run_does_not_name_is_as_in_all_others() -> None:
    assert PROGRAM.settings("three") == ("--epochs 1", "--until-stopped")
    assert PROGRAM.settings("one") == ("--epochs 3", "--until-stopped")


def test_the_last_quality_counts_and_none_is_a_failure() -> None:
    printed = "loss 0.5\nright 1\nloss 0.25\nright 2\n"
    assert (PROGRAM.losses(printed), PROGRAM.final_quality(printed)) == ([0.5, 0.25], 2.0)
    with pytest.raises(RunFailed, match=r"p printed nothing like .*: 'loss 0.5'"):
        PROGRAM.final_quality("loss 0.5\n")


def test_missing_sources_are_named_with_the_command_that_gets_them(tmp_path: Path) -> None:
    expected = (
        f"{tmp_path}/owner.name has no commit 000000000000: git clone https://example.org/owner/name {tmp_path}/owner.name"
    )
    with pytest.raises(RunFailed, match=expected):
        find(PROGRAM, tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path / "owner+name"], check=True)
    with pytest.raises(RunFailed, match=expected):
        find(PROGRAM, tmp_path)


def test_the_command_needs_sources_unless_it_only_draws() -> None:
    result = CliRunner().invoke(command.main, [])
    assert result.exit_code == 2
    assert "--sources is missing" in result.output


def test_the_order_is_that_of_the_server_and_new_in_each_epoch() -> None:
    batches = Dealt(10, 4)
    first, second = list(batches), list(batches)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second


def results(one: float, longer: float, *losses: float, seed: int = 0) -> dict[Run, Outcome]:
    qualities = {"plain": one, "one": one, "three": one - 1, "longer": longer}
    return {
        Run(kind, seed): Outcome(quality, 2.0, list(losses) if kind == "one" else [0.5, 0.25])
        for kind, quality in qualities.items()
    }


def test_the_losses_of_one_worker_are_compared_with_those_of_the_program_alone() -> None:
    assert apart(results(1, 1, 0.5, 0.25)) == "0"
    printed = results(1, 1, 2.2001, 0.25) | {Run("plain", 0): Outcome(1, 2.0, [2.2002, 0.25])}
    assert apart(printed) == "0.0001", "one in the last digit printed"
    assert apart(results(1, 1, 0.5, 0.375)) == "0.12, rounding not measured"
    noise = {Run(NOISE, 0): Outcome(1, 1, [0.75, 0.25])}
    assert apart(results(1, 1, 0.5, 0.375) | noise) == "0.12, rounding 0.25"
    assert apart(results(1, 1, 0.5)) == "fewer losses"


def test_the_table_begins_with_the_program_where_three_workers_lose_most() -> None:
    worse, better = results(10, 8, 0.5, 0.25), results(10, 12, 0.5, 0.25)
    lines = ported_table(
        [(replace(PROGRAM, name=name), found) for name, found in (("gcn", better), ("vae", worse))]
    ).splitlines()
    assert [line.count("|") for line in lines] == [len(HEADS) + 1] * 4
    assert lines[2].startswith("| [vae](https://example.org/owner/name/blob/0000000000/a/main.py): a net |")
    assert lines[2].endswith("| right | 10 | 10 | 9 | 8 |")
    assert (gain(PROGRAM, worse), noise(worse)) == (-0.2, 0.0)
    assert noise(worse | results(9, 11, seed=1)) == pytest.approx(3 / 9.5)
