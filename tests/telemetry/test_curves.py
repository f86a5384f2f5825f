"""The curves of a run: bounded, from its start to now, and continued after a restart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
from gem_api.history import COLUMNS, read_history
from gem_server.apply_loop import Timing
from gem_server.core.state_machine import Core
from gem_server.telemetry.curves import MAX_POINTS, MIN_INTERVAL, Curves, Point
from gem_server.telemetry.history import EarlierCurves, History
from gem_server.telemetry.progress import Evaluation, Progress
from kit.core import commit, make_core, start

NO_TIME = Timing(0.0, 0.0)


@dataclass
class Watched:
    """A core, its progress and its curves, on a clock that the test moves."""

    core: Core = field(default_factory=make_core)
    progress: Progress = field(default_factory=lambda: Progress(0.0))
    now: float = 1000.0
    earlier: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.curves = Curves(self.core, self.progress, lambda: self.now, self.earlier)

    def commit(self, lease_id: str = "lease-1", loss: float | None = 0.5) -> None:
        sequence = self.core.leases.get(lease_id).sequence + 1
        self.progress.applied(commit(self.core, lease_id, sequence, 1.0, loss=loss), NO_TIME)

    def train(self, seconds: float, per_sample: int = 1, loss: float | None = 0.5) -> None:
        """As many samples as fit into the time, with commits before each."""
        for _ in range(round(seconds / MIN_INTERVAL)):
            for _ in range(per_sample):
                self.commit(loss=loss)
            self.now += MIN_INTERVAL
            self.curves.sample()


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    start(watched.core)
    return watched


def seconds(points: list[Point]) -> list[float]:
    return [point.seconds for point in points]


@pytest.mark.parametrize("minutes", [0.1, 3, 11, 45])
def test_the_curves_have_a_bounded_number_of_points_and_cover_the_whole_run(watched: Watched, minutes: float) -> None:
    watched.train(60 * minutes)
    points = watched.curves.points
    assert len(points) <= MAX_POINTS
    assert len(points) >= min(MAX_POINTS // 2, 60 * minutes / MIN_INTERVAL)
    assert (points[0].seconds, points[0].version) == (0.0, 1)
    gaps = [after - before for before, after in zip(seconds(points), seconds(points)[1:], strict=False)]
    assert min(gaps) > 0
    assert points[-1].seconds >= 60 * minutes - MIN_INTERVAL - max(gaps, default=0)
    assert max(gaps) <= 2.1 * 60 * minutes / len(points)
    versions = [point.version for point in points]
    assert versions == sorted(versions)
    until_now = watched.curves.until_now()
    assert until_now[-1].version == watched.core.central.version
    assert until_now[-1].seconds == pytest.approx(60 * minutes - MIN_INTERVAL)


def test_a_point_has_the_figures_of_its_moment(watched: Watched) -> None:
    watched.train(10, per_sample=2, loss=0.25)
    watched.progress.evaluated(Evaluation(80, loss=0.3, accuracy=0.9))
    watched.train(MIN_INTERVAL, loss=0.25)
    point = watched.curves.points[-1]
    assert (point.version, point.workers, point.staleness) == (81, 1, 0.0)
    assert point.loss == pytest.approx(0.25)
    assert (point.evaluation_loss, point.accuracy) == (0.3, 0.9)
    assert point.pi_median == pytest.approx(watched.progress.pi_median.value)
    assert point.commits_per_second == pytest.approx(2 / MIN_INTERVAL, rel=0.1)


def test_no_evaluation_gets_lost_when_points_are_merged(watched: Watched) -> None:
    """Sparse evaluations: each stays in a point, none is repeated."""
    for number in range(40):
        watched.progress.evaluated(Evaluation(number, loss=float(number), accuracy=None))
        watched.train(20)
    found = [point.evaluation_loss for point in watched.curves.points if point.evaluation_loss is not None]
    assert found == [float(number) for number in range(40)]


def test_nan_losses_and_missing_losses_leave_gaps_not_numbers(watched: Watched) -> None:
    watched.train(1, loss=None)
    assert {point.loss for point in watched.curves.points} == {None}
    watched.train(1, loss=math.nan)
    assert {point.loss for point in watched.curves.points} == {None}


def test_time_stands_still_before_the_first_commit_and_without_workers(watched: Watched) -> None:
    for _ in range(100):
        watched.now += 3600
        watched.curves.sample()
    assert watched.curves.until_now() == []
    watched.train(5)
    watched.core.leave("lease-1")
    for _ in range(100):
        watched.now += 3600
        watched.curves.sample()
    assert watched.curves.points[-1].seconds <= 5 + MIN_INTERVAL
    assert watched.curves.commits_per_second == 0


def test_the_rate_falls_to_zero_when_workers_stall(watched: Watched) -> None:
    watched.train(10, per_sample=5)
    assert watched.curves.commits_per_second == pytest.approx(20, rel=0.1)
    for _ in range(40):
        watched.now += MIN_INTERVAL
        watched.curves.sample()
    assert watched.curves.points[-1].commits_per_second == 0


# -- after a restart


def row(version: int, at: float, loss: object = 0.5, pi: object = "", discarded: int = 0) -> list[str]:
    values = {
        "version": version, "ticket": version, "unix_seconds": f"{at:.6f}", "worker": "ann", "sequence": version,
        "discarded": discarded, "staleness": 3, "loss": loss, "samples": 8, "pi_median": pi,
    }  # fmt: skip
    return [str(values.get(name, "")) for name in COLUMNS]


def curves(path: Path, rows: list[list[str]]) -> list[Point]:
    """The points of a history with these rows."""
    path.write_text("".join(",".join(fields) + "\r\n" for fields in [list(COLUMNS), *rows]))
    earlier = EarlierCurves()
    for piece in read_history(path):
        earlier.add(piece.columns)
    return earlier.points()


def test_a_history_becomes_curves_over_all_of_its_time(tmp_path: Path) -> None:
    points = curves(tmp_path / "h.csv", [row(n, 1.7e9 + n / 10, loss=1000 - n, pi=0.5) for n in range(1, 100_001)])
    assert len(points) == MAX_POINTS // 2
    assert (points[0].seconds, points[0].version, points[0].loss) == (0.0, 1, 999.0)
    assert points[-1].seconds == pytest.approx(9999.9)
    assert points[-1].version == 100_000
    assert points[-1].loss == pytest.approx(1000 - 100_000 + 24.5)  # the mean of the last 50
    assert (points[-1].staleness, points[-1].pi_median) == (3, 0.5)
    assert points[-1].commits_per_second == pytest.approx(10)
    assert seconds(points) == sorted(set(seconds(points)))


def test_a_time_without_a_server_counts_as_a_minute_and_a_clock_set_back_as_nothing(tmp_path: Path) -> None:
    times = [0.0, 1.0, 2.0, 86400.0, 86401.0, 500.0, 501.0]
    points = curves(tmp_path / "h.csv", [row(n + 1, at) for n, at in enumerate(times)])
    assert points[-1].seconds == pytest.approx(1 + 1 + 60 + 1 + 0 + 1)


@pytest.mark.parametrize("damage", ["", "nan", "inf", "-1e999"])
def test_what_is_not_a_number_in_a_history_counts_as_unknown(damage: str, tmp_path: Path) -> None:
    lines = [row(1, 1.0, loss=damage, pi=damage), row(2, 2.0)]
    lines[1][COLUMNS.index("unix_seconds")] = damage
    points = curves(tmp_path / "h.csv", lines)
    assert [point.version for point in points] in ([1, 2], [2])
    assert points[-1].loss == 0.5
    assert points[-1].pi_median is None
    assert all(math.isfinite(point.seconds) for point in points)


def test_no_history_gives_no_points(tmp_path: Path) -> None:
    assert curves(tmp_path / "h.csv", []) == []


def test_a_resumed_run_shows_its_earlier_curve(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    now = [1.7e9]
    history = History(path, 1, lambda: now[0], structlog.get_logger())
    for number in range(200):
        now[0] += 0.5
        sequence = watched.core.leases.get("lease-1").sequence + 1
        history.applied(commit(watched.core, "lease-1", sequence, 1.0, loss=2.0 + number), NO_TIME)
    history.close()

    again = History(path, 201, lambda: 0.0, structlog.get_logger())
    again.close()
    resumed = Watched(watched.core, earlier=again.earlier)
    assert (resumed.curves.begin_version, resumed.curves.start_version) == (0, 200)
    assert (resumed.curves.points[0].loss, resumed.curves.points[-1].version) == (2.0, 200)
    resumed.train(5)
    assert seconds(resumed.curves.points) == sorted(set(seconds(resumed.curves.points)))
    assert resumed.curves.until_now()[-1].seconds == pytest.approx(0.5 * 199 + 5, abs=MIN_INTERVAL)
    assert resumed.curves.until_now()[-1].version == 220


def test_a_long_run_that_is_resumed_again_and_again_keeps_the_shape_of_its_curve(watched: Watched, tmp_path: Path) -> None:
    """New points are as far apart as the earlier ones, so that thinning out treats all of them alike."""
    earlier = curves(tmp_path / "h.csv", [row(n, 1.7e9 + 10.0 * n) for n in range(1, 10_001)])  # 28 hours
    watched.commit()
    resumed = Watched(watched.core, earlier=earlier)
    resumed.train(3600)
    new = [point for point in resumed.curves.points if point.seconds > earlier[-1].seconds]
    assert len(new) == pytest.approx(3600 / (earlier[-1].seconds / 300), abs=2)
    assert len(resumed.curves.points) <= MAX_POINTS


def test_curves_say_where_they_begin_if_the_history_is_gone(watched: Watched) -> None:
    watched.train(5)
    resumed = Watched(watched.core)
    assert (resumed.curves.begin_version, resumed.curves.start_version) == (20, 20)
    assert resumed.curves.points == []
