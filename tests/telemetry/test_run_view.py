"""The view of a run: its rate and its curves, which are bounded, from its start to now, and continued after a restart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import structlog
from gem_api.curves import BINS
from gem_api.history import COLUMNS, read_history
from gem_api.timeline import SAMPLE_SECONDS, Rate, Timeline
from gem_api.v1 import training_pb2 as pb
from gem_server.commit_times import CommitTimes
from gem_server.core.state_machine import Core
from gem_server.core.values import Applied
from gem_server.telemetry.history import History
from gem_server.telemetry.progress import Evaluation, Progress
from gem_server.telemetry.run_view import RunView
from kit.core import commit, make_core, start

NO_TIME = CommitTimes()


@dataclass
class Watched:
    """A core, its progress and its view, on a clock that the test moves."""

    core: Core = field(default_factory=make_core)
    progress: Progress = field(default_factory=lambda: Progress(0.0))
    now: float = 1000.0
    earlier: Timeline = field(default_factory=Timeline)
    _applied: Applied | None = None

    def __post_init__(self) -> None:
        self.view = RunView(self.core, self.progress, lambda: self.now, self.earlier)

    @property
    def curves(self) -> pb.RunCurves:
        return self.view.read(curves=True).curves

    @property
    def rate(self) -> float | None:
        status = self.view.read()
        return status.commits_per_second if status.HasField("commits_per_second") else None

    def commit(self, loss: float | None = 0.5) -> None:
        """The facts of a real commit again and again: the rule itself is of no interest here."""
        if self._applied is None:
            self._applied = commit(self.core, "lease-1", self.core.leases.get("lease-1").sequence + 1, 1.0)
        else:
            self.core.central.version += 1
        self.progress.applied(replace(self._applied, version=self.core.central.version, loss=loss), NO_TIME)

    def train(self, seconds: float, per_sample: int = 1, loss: float | None = 0.5) -> None:
        """As many samples as fit into the time, with commits before each."""
        for _ in range(round(seconds / SAMPLE_SECONDS)):
            for _ in range(per_sample):
                self.commit(loss=loss)
            self.wait(SAMPLE_SECONDS)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.view.sample()


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    start(watched.core)
    return watched


def known(column: object) -> list[float]:
    return [value for value in column if not math.isnan(value)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("minutes", [0.1, 3, 11])
def test_the_curves_have_a_bounded_number_of_points_and_cover_the_whole_run(watched: Watched, minutes: float) -> None:
    watched.train(60 * minutes)
    curves, seconds, samples = watched.curves, list(watched.curves.seconds), 60 * minutes / SAMPLE_SECONDS
    assert min(BINS // 2, samples) <= len(seconds) <= BINS + 1
    assert seconds == sorted(seconds)
    assert seconds[0] <= 60 * minutes / BINS
    assert seconds[-1] == pytest.approx(60 * minutes - SAMPLE_SECONDS)
    gaps = [after - before for before, after in pairwise(seconds)]
    assert max(gaps) <= 2.1 * 60 * minutes / len(seconds)
    assert list(curves.version) == sorted(curves.version)
    assert curves.version[-1] == watched.core.central.version


def test_a_point_has_the_figures_of_its_time_and_each_evaluation_is_in_one(watched: Watched) -> None:
    watched.train(10, per_sample=2, loss=0.25)
    watched.progress.evaluated(Evaluation(80, loss=0.3, accuracy=0.9), now=0.0)
    watched.train(SAMPLE_SECONDS, loss=0.25)
    curves = watched.curves
    assert (curves.version[-1], curves.workers[-1], curves.staleness[-1]) == (81, 1, 0.0)
    assert (curves.loss[-1], curves.pi_median[-1]) == pytest.approx((0.25, watched.progress.pi_median.value))
    assert curves.commits_per_second[-1] == pytest.approx(2 / SAMPLE_SECONDS, rel=0.1)
    assert known(curves.evaluation_loss) == pytest.approx([0.3])
    assert known(curves.accuracy) == pytest.approx([0.9])


def test_the_scaling_factor_of_a_worker_is_smoothed_over_its_own_commits() -> None:
    progress, watched = Progress(0.0), Watched()
    start(watched.core)
    plain = commit(watched.core, "lease-1", 1, 1.0)
    assert plain.pi is not None
    for worker, median in (("ann", 1.0), ("bob", 5.0), ("ann", 2.0)):
        progress.applied(replace(plain, worker=worker, pi=replace(plain.pi, median=median)), NO_TIME)
    medians = {name: worker.pi_median.value for name, worker in progress.workers.items()}
    assert medians == pytest.approx({"ann": 1.5, "bob": 5.0}, abs=0.01)


def test_the_status_has_the_smoothed_scaling_factor_of_each_worker(watched: Watched) -> None:
    watched.train(5)
    (worker,) = watched.view.read().workers
    assert worker.pi_median == watched.progress.workers[worker.name].pi_median.value


def test_no_evaluation_gets_lost_in_a_long_run(watched: Watched) -> None:
    for number in range(40):
        watched.progress.evaluated(Evaluation(number, loss=float(number), accuracy=None), now=0.0)
        watched.train(20)
    assert known(watched.curves.evaluation_loss) == [float(number) for number in range(40)]


def test_nan_losses_and_missing_losses_leave_gaps_not_numbers(watched: Watched) -> None:
    watched.train(1, loss=None)
    watched.train(1, loss=math.nan)
    assert known(watched.curves.loss) == []


def test_time_stands_still_before_the_first_commit_and_without_workers(watched: Watched) -> None:
    for _ in range(100):
        watched.wait(3600)
    assert list(watched.curves.seconds) == []
    watched.train(5)
    watched.core.leave("lease-1")
    for _ in range(100):
        watched.wait(3600)
    assert watched.curves.seconds[-1] <= 5 + SAMPLE_SECONDS
    assert watched.rate == 0


def test_the_rate_is_that_of_the_last_seconds_from_the_first_commit_to_the_last(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(100):
        watched.wait(SAMPLE_SECONDS)
    assert watched.rate is None
    watched.train(1, per_sample=5)
    assert watched.rate is None
    watched.train(10, per_sample=5)
    assert watched.rate == pytest.approx(20)
    for _ in range(40):
        watched.wait(SAMPLE_SECONDS)
    assert watched.rate == 0
    monkeypatch.setattr(watched.core.ledger, "complete_for", lambda workers: True)
    assert watched.rate is None, "after the end it would fall for seconds, and say nothing"


def test_samples_at_the_same_moment_divide_nothing_by_zero() -> None:
    rate = Rate()
    rate.add(1, 5.0)
    rate.add(2, 5.0)
    assert rate.value is None


# -- after a restart


def row(version: int, at: float, loss: object = 0.5, pi: object = "") -> list[str]:
    values = {
        "version": version, "ticket": version, "unix_seconds": f"{at:.6f}", "worker": "ann", "sequence": version,
        "discarded": 0, "staleness": 3, "loss": loss, "samples": 8, "pi_median": pi,
    }  # fmt: skip
    return [str(values.get(name, "")) for name in COLUMNS]


def replayed(path: Path, rows: list[list[str]]) -> Timeline:
    """The curves of a history with these rows."""
    path.write_text("".join(",".join(fields) + "\r\n" for fields in [list(COLUMNS), *rows]))
    timeline = Timeline()
    for piece in read_history(path):
        timeline.replay(piece.columns)
    return timeline


def test_a_history_becomes_curves_over_all_of_its_time(tmp_path: Path) -> None:
    rows = [row(n, 1.7e9 + n / 10, loss=1000 - n, pi=0.5) for n in range(1, 10_001)]
    curves = replayed(tmp_path / "h.csv", rows).columns()
    assert BINS // 2 <= len(curves["seconds"]) <= BINS + 1
    assert curves["seconds"][0] < 999.9 / BINS * 2
    assert (curves["seconds"][-1], curves["version"][-1]) == pytest.approx((999.9, 10_000))
    assert curves["loss"][-1] == pytest.approx(1000 - 10_000 + 49)  # the moving mean of about the last 50
    assert (curves["staleness"][-1], curves["pi_median"][-1]) == pytest.approx((3, 0.5))
    assert curves["commits_per_second"][-1] == pytest.approx(10)
    assert list(curves["seconds"]) == sorted(curves["seconds"])


def test_a_time_without_a_server_counts_as_a_minute_and_a_clock_set_back_as_nothing(tmp_path: Path) -> None:
    times = [0.0, 1.0, 2.0, 86400.0, 86401.0, 500.0, 501.0]
    timeline = replayed(tmp_path / "h.csv", [row(n + 1, at) for n, at in enumerate(times)])
    assert timeline.seconds == pytest.approx(1 + 1 + 60 + 1 + 0 + 1)


@pytest.mark.parametrize("damage", ["", "nan", "inf", "-1e999"])
def test_what_is_not_a_number_in_a_history_counts_as_unknown(damage: str, tmp_path: Path) -> None:
    lines = [row(1, 1.0, loss=damage, pi=damage), row(2, 2.0)]
    lines[1][COLUMNS.index("unix_seconds")] = damage
    curves = replayed(tmp_path / "h.csv", lines).columns()
    assert (curves["version"][-1], curves["loss"][-1]) == (2, 0.5)
    assert known(curves["pi_median"]) == []
    assert known(curves["seconds"]) == list(curves["seconds"])


def test_every_evaluation_of_a_history_is_on_the_curves() -> None:
    """Samples are a little further apart than bins are wide: some bins have an evaluation and no sample."""
    timeline, versions = Timeline(), np.arange(1.0, 1001.0)
    timeline.replay({"version": versions, "unix_seconds": 0.09 * versions})
    for version in versions:
        timeline.evaluated(version, loss=version, accuracy=None)
    losses = known(timeline.columns()["evaluation_loss"])
    assert losses == sorted(losses)
    assert sum(losses) / len(losses) == pytest.approx(versions.mean(), rel=0.02)


def test_a_resumed_run_shows_its_earlier_curve(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    now = [1.7e9]
    history = History(path, 1, lambda: now[0], structlog.get_logger(), resumed=False)
    for number in range(200):
        now[0] += 0.5
        sequence = watched.core.leases.get("lease-1").sequence + 1
        history.applied(commit(watched.core, "lease-1", sequence, 1.0, loss=2.0 + number), NO_TIME)
    history.close()

    again = History(path, 201, lambda: 0.0, structlog.get_logger(), resumed=True)
    again.close()
    resumed = Watched(watched.core, earlier=again.earlier)
    status = resumed.view.read(curves=True)
    assert (status.begin_version, status.start_version) == (0, 200)
    assert (status.curves.loss[0], status.curves.version[-1]) == (2.0, 200)
    resumed.train(5)
    curves = resumed.curves
    assert list(curves.seconds) == sorted(curves.seconds)
    assert (curves.seconds[-1], curves.version[-1]) == pytest.approx((0.5 * 199 + 5, 220), abs=SAMPLE_SECONDS)


def test_an_evaluation_between_two_samples_has_its_version(watched: Watched, tmp_path: Path) -> None:
    earlier = replayed(tmp_path / "h.csv", [row(n, 1.7e9 + 0.1 * n) for n in range(1, 201)])  # a sample every third commit
    for version in range(1, 200):
        earlier.evaluated(version, loss=1.0 / version, accuracy=None)
    status = Watched(watched.core, earlier=earlier).view.read(curves=True)
    assert list(status.curves.version) == sorted(status.curves.version)
    assert len(known(status.curves.evaluation_loss)) > len(known(status.curves.loss))


def test_a_long_run_that_is_resumed_keeps_the_shape_of_its_curve(watched: Watched, tmp_path: Path) -> None:
    """New points are as far apart as the earlier ones."""
    earlier = replayed(tmp_path / "h.csv", [row(n, 1.7e9 + 4.0 * n) for n in range(1, 2_001)])  # 2.2 hours
    before, span = len(earlier.columns()["seconds"]), earlier.seconds
    watched.commit()
    resumed = Watched(watched.core, earlier=earlier)
    resumed.train(360)
    assert len(resumed.curves.seconds) - before == pytest.approx(360 * before / span, abs=2)


def test_curves_come_only_if_they_are_asked_for(watched: Watched) -> None:
    watched.train(1)
    assert not watched.view.read().HasField("curves")
