"""A history of any length, condensed: the means of its bins, the workers at work, the rate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ctl.report_pages import BEGIN, history, in_turn
from gem_api.curves import BINS
from gem_api.history import HistoryError, Piece, read_history
from gem_ctl.curves import COLUMNS, RunCurves
from gem_ctl.recorded_run import read_run


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
