"""gem-ctl top without a server or a terminal: what is derived from successive statuses, and the picture of it."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from gem_api.errors import ServerUnavailable
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_ctl.picture import SORTS, Picture, plain
from gem_ctl.text import figure, rate, sparkline
from gem_ctl.watch import Rate, Watch
from rich.cells import cell_len
from rich.console import Console

NAN = float("nan")


def worker(name: str, **fields: Any) -> pb.WorkerStatus:
    return pb.WorkerStatus(**{"name": name, "lease_remaining_seconds": 60.0, **fields})


def crew(count: int, **fields: Any) -> list[pb.WorkerStatus]:
    return [worker(f"worker-{number}", **fields) for number in range(count)]


def shards(**fields: int) -> pb.ShardStatus:
    return pb.ShardStatus(**{"epochs": 10, **fields})


def status(**fields: Any) -> pb.GetStatusResponse:
    """A training run's; 10 seconds up, version 100, no workers."""
    return pb.GetStatusResponse(
        **{
            "run_id": "run-1",
            "state": pb.RUN_STATE_TRAINING,
            "version": 100,
            "hyperparameters": Hyperparameters(epochs=10).to_message(),
            "commits": {"applied": 100, "rejected": 2, "repeated": 3},
            "shards": shards(),
            "uptime_seconds": 10.0,
            "server_version": "1.2.3",
            **fields,
        }
    )


def watched(*statuses: pb.GetStatusResponse) -> Watch:
    """A watch that saw one status each second, from 1 on."""
    watch = Watch(0.0)
    for second, answer in enumerate(statuses, 1):
        watch.saw(answer, float(second))
    return watch


def drawn(watch: Watch, width: int = 80, height: int | None = None, sort: str = "name", now: float = 9.0) -> list[str]:
    """The picture's lines."""
    return plain(Picture(watch, "host:1", sort).draw(width, height, now), width).splitlines()


def names(lines: list[str]) -> list[str]:
    """Of the workers shown, from the top."""
    return [line.split()[0] for line in lines if line.startswith("worker-")]


def line_of(lines: list[str], start: str) -> str:
    (line,) = (line for line in lines if line.startswith(start))
    return line


# -- rates


def test_rates_are_unknown_at_first_then_what_was_added_per_second() -> None:
    first = status(version=100, shards=shards(samples_committed=6400), workers=[worker("ann", commits=40)])
    second = status(version=130, shards=shards(samples_committed=8320), workers=[worker("ann", commits=50)])
    watch = watched(first)
    assert (watch.commits.value, watch.samples.value, watch.workers["ann"].value) == (None, None, None)
    watch.saw(second, 3.0)
    assert (watch.commits.value, watch.samples.value, watch.workers["ann"].value) == (15.0, 960.0, 5.0)


def test_a_rate_is_that_of_the_last_seconds_only() -> None:
    counter = Rate()
    for second in range(100):
        counter.saw(0, float(second))
    for second in range(6):
        counter.saw(10 * second, 100.0 + second)
    assert counter.value == 10.0


def test_polls_at_the_same_moment_divide_nothing_by_zero() -> None:
    counter = Rate()
    counter.saw(1, 5.0)
    counter.saw(2, 5.0)
    assert counter.value is None


@pytest.mark.parametrize(
    "after",
    [
        status(version=90, uptime_seconds=1.0),  # back from an older checkpoint
        status(version=90, uptime_seconds=20.0),
        status(version=150, uptime_seconds=1.0),  # back from a checkpoint, and already past where it was
        status(version=150, run_id="run-2"),
    ],
    ids=["restarted", "version back", "restarted and ahead", "another run"],
)
def test_after_a_restart_rates_are_unknown_again_never_negative(after: pb.GetStatusResponse) -> None:
    before = status(version=120, workers=[worker("ann", commits=9)])
    after.workers.append(worker("ann", commits=11))
    watch = watched(status(workers=[worker("ann", commits=5)]), before, after)
    assert (watch.commits.value, watch.samples.value, watch.workers["ann"].value) == (None, None, None)
    assert "commits/s   –" in line_of(drawn(watch), "commits/s")
    again = pb.GetStatusResponse.FromString(after.SerializeToString())
    again.version += 7
    watch.saw(again, 4.0)
    assert watch.commits.value == 7.0


def test_a_worker_whose_count_starts_anew_has_an_unknown_rate_while_the_others_keep_theirs() -> None:
    first = [worker("ann", commits=50), worker("bob", commits=50)]
    second = [worker("ann", commits=60), worker("bob", commits=2)]
    watch = watched(status(workers=first), status(workers=second))
    assert (watch.workers["ann"].value, watch.workers["bob"].value) == (10.0, None)


def test_a_worker_that_left_is_forgotten() -> None:
    watch = watched(status(workers=crew(2)), status(workers=crew(1)))
    assert list(watch.workers) == ["worker-0"]


def test_histories_outlive_a_restart_but_not_the_run() -> None:
    watch = watched(status(training_loss=3.0), status(training_loss=2.0), status(training_loss=2.5, uptime_seconds=1.0))
    assert list(watch.histories["loss"]) == [3.0, 2.0, 2.5]
    watch.saw(status(run_id="run-2", training_loss=9.0), 4.0)
    assert list(watch.histories["loss"]) == [9.0]


# -- figures


def test_a_sparkline_spans_its_values_and_a_steady_value_looks_steady() -> None:
    assert sparkline([0, 5, 10]) == "▁▄▇"
    assert sparkline([100, 101, 99]) == "▄▄▄"
    assert sparkline([0, 0]) == "▄▄"
    assert sparkline([]) == ""


def test_a_sparkline_marks_what_is_not_finite_and_leaves_out_what_is_unknown() -> None:
    assert sparkline([None, 1, NAN, 2, math.inf, 3]) == " ▁×▄×▇"
    assert sparkline([NAN]) == "×"


@pytest.mark.parametrize("values", [[1.7e308, -1.7e308], [5e-324, 0], [-1e-300, 1e300]], ids=str)
def test_a_sparkline_takes_numbers_of_any_size(values: list[float]) -> None:
    assert len(sparkline(values)) == 2


@pytest.mark.parametrize("value", [0.0, -0.5, 999.9999, -1234.5, 1.7e308, -5e-324, NAN, -math.inf, None], ids=str)
def test_figures_fit_their_column_however_large_they_are(value: float | None) -> None:
    assert 1 <= len(figure(value)) <= 10


def test_slow_and_fast_rates_have_three_digits_or_more() -> None:
    assert [rate(value) for value in (None, 0.0, 0.034, 12.34, 12345.6)] == ["–", "0.00", "0.03", "12.3", "12346"]


# -- the picture


def test_the_picture_shows_the_run_at_a_glance() -> None:
    run = status(
        workers=crew(3, commits=40, staleness=2, pi_median=0.5, loss=1.25, shards=1, transport="memory"),
        training_loss=1.5,
        pi_median=0.75,
        staleness=2.1,
        queue_length=4,
        memory_bytes=1 << 20,
        memory_limit_bytes=1 << 30,
        checkpoint_version=90,
        checkpoint_age_seconds=61.0,
        leases_ended={"expired": 2, "left": 1},
        evaluation=pb.ReportEvaluationRequest(version=80, loss=0.25, accuracy=0.9),
        shards=shards(epoch=1, pending=4, leased=3, completed=13, samples_completed=3328),
    )
    assert drawn(watched(run)) == [
        "run run-1  TRAINING  up 0:00:10                            host:1, version 1.2.3",
        "gem, η 0.05, μ 0.9, κ 1, π ≤ 5, snapshot after, batch 64, partition",
        "epoch 2 of 10  ━━━━━────────────────────────────────────────  13 %  3328 samples",
        "version     100                         samples/s   –",
        "commits/s   –                           loss        1.5000    ▄",
        "staleness   2.1 (2 expected) ▄          median π    0.750     ▄",
        "queue       4                           commits     2 rejected, 3 repeated",
        "memory      1 MiB of 1 GiB              checkpoint  version 90, 0:01:01 ago",
        "evaluation  loss 0.2500, accuracy 90.00 % at version 80",
        "leases      3 live; ended: 2 expired, 1 left",
        "worker   commits commits/s staleness median π      loss shards    via  lease",
        *(f"worker-{number}      40         –         2    0.500    1.2500      1 memory   60 s" for number in range(3)),
    ]


def test_a_server_that_nobody_has_joined_has_a_picture_too() -> None:
    nothing = pb.GetStatusResponse(run_id="run-1", state=pb.RUN_STATE_WAITING, hyperparameters=status().hyperparameters)
    lines = drawn(watched(nothing, nothing), height=24)
    assert "WAITING" in lines[0]
    assert lines[-1] == "no live workers"
    assert "0.0 (0 expected)" in line_of(lines, "staleness")
    assert "checkpoint  none" in line_of(lines, "memory")
    assert line_of(lines, "evaluation") == "evaluation  –"


def progress(**fields: int) -> str:
    return line_of(drawn(watched(status(shards=shards(**fields)))), "epoch")


def test_the_bar_grows_with_the_shards_completed_of_all_epochs() -> None:
    assert "  0 %" in progress()
    assert "  50 %" in progress(epoch=4, completed=50)
    assert "  51 %" in progress(epoch=5, completed=51, leased=4, pending=5)
    assert "  99 %" in progress(epoch=9, completed=999, leased=1)
    full = progress(epoch=9, completed=100, samples_completed=1000)
    assert "  100 %" in full
    assert "─" not in full
    assert len(full) == 80


def test_without_a_last_epoch_there_is_no_bar() -> None:
    assert progress(epochs=0, epoch=6, completed=9, samples_completed=77) == "epoch 7, no limit  77 samples"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("downpour", "downpour, η 0.05, batch 64, partition, 40 steps"),
        ("adaptive", "adaptive, η 0.05, batch 64, partition, 40 steps"),
    ],
)
def test_a_rule_without_momentum_shows_none(rule: str, text: str) -> None:
    assert drawn(watched(status(hyperparameters=Hyperparameters(rule=rule, steps=40).to_message())))[1] == text


# -- what is off


def test_what_is_off_is_marked_and_nothing_else() -> None:
    calm = [worker("worker-0", staleness=6, loss=1.0), worker("worker-1", staleness=0)]
    off = [worker("worker-2", staleness=7, loss=NAN, lease_remaining_seconds=19.0)]
    lines = drawn(watched(status(workers=calm + off, memory_bytes=90, memory_limit_bytes=100)))
    assert [line for line in lines if "!" in line] == [line_of(lines, "worker-2")]
    assert re.search(r"! 7 .*! nan .*! 19 s$", line_of(lines, "worker-2"))
    lines = drawn(watched(status(memory_bytes=91, memory_limit_bytes=100, training_loss=math.inf)))
    assert "memory      ! 91 B of 100 B" in line_of(lines, "memory")
    assert "loss        ! inf" in line_of(lines, "commits/s")


def test_the_mark_has_a_colour_where_there_are_colours() -> None:
    def ansi(**settings: Any) -> str:
        page = io.StringIO()
        console = Console(file=page, width=80, force_terminal=True, color_system="standard", **settings)
        console.print(Picture(watched(status(workers=[worker("ann", loss=NAN)])), "host:1", "name").draw(80, 24, 1.0))
        return page.getvalue()

    assert re.search(r"\x1b\[1;31m *! nan\x1b\[0m", ansi(no_color=False))
    assert re.search(r"\x1b\[1m *! nan\x1b\[0m", ansi(no_color=True))


def test_a_single_worker_may_still_have_the_staleness_of_the_crowd_that_left() -> None:
    assert "! " not in "".join(drawn(watched(status(workers=[worker("ann", staleness=3)]))))


def test_a_lease_is_nearly_over_by_what_it_once_was() -> None:
    fresh = [worker("worker-0", lease_remaining_seconds=15.0), worker("worker-1", lease_remaining_seconds=15.0)]
    later = [worker("worker-0", lease_remaining_seconds=11.0), worker("worker-1", lease_remaining_seconds=4.0)]
    lines = drawn(watched(status(workers=fresh), status(workers=later)))
    assert line_of(lines, "worker-0").endswith("   11 s")
    assert line_of(lines, "worker-1").endswith(" ! 4 s")


# -- sorting


def test_names_are_sorted_as_people_count() -> None:
    shuffled = [worker(name) for name in ("worker-10", "worker-9", "worker-1b", "worker-1", "worker-100")]
    assert names(drawn(watched(status(workers=shuffled)))) == ["worker-1", "worker-1b", "worker-9", "worker-10", "worker-100"]


@pytest.mark.parametrize("sort", SORTS)
def test_names_of_any_make_can_be_sorted(sort: str) -> None:
    odd = ["7", "a7", "²", "٣", "[bold]x", "worker 1", "", "-", "长名字", "7a7"]
    assert len(drawn(watched(status(workers=[worker(name) for name in odd])), sort=sort)) == 11 + len(odd)


def test_markup_in_a_name_stays_text() -> None:
    assert "[bold]ann" in "\n".join(drawn(watched(status(workers=[worker("[bold]ann")]))))


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("commits", ["worker-2", "worker-0", "worker-3", "worker-1"]),
        ("rate", ["worker-3", "worker-0", "worker-1", "worker-2"]),
        ("staleness", ["worker-1", "worker-2", "worker-0", "worker-3"]),
        ("loss", ["worker-1", "worker-3", "worker-0", "worker-2"]),
    ],
)
def test_figures_are_sorted_downwards_what_is_no_number_first_what_is_unknown_last(sort: str, order: list[str]) -> None:
    before = [worker("worker-0", commits=18), worker("worker-1", commits=5), worker("worker-3", commits=0)]
    now = [
        worker("worker-0", commits=20, staleness=1, loss=0.5),
        worker("worker-1", commits=6, staleness=5, loss=NAN),
        worker("worker-2", commits=30, staleness=2),
        worker("worker-3", commits=10, staleness=1, loss=2.0),
    ]
    assert names(drawn(watched(status(workers=before), status(workers=now)), sort=sort)) == order


# -- fitting


@pytest.mark.parametrize("height", [1, 2, 8, 11, 12, 13, 24, 50, 110, 111, 115, 200])
@pytest.mark.parametrize("error", [None, ServerUnavailable("gone")], ids=["answered", "gone"])
def test_the_picture_of_a_hundred_workers_fits_any_height_that_has_room_for_the_figures(
    height: int, error: ServerUnavailable | None
) -> None:
    watch = watched(status(workers=crew(100)))
    watch.error = error
    lines = drawn(watch, height=height)
    assert len(lines) <= max(height, 12 + (error is not None))
    shown = len(names(lines))
    assert shown == 100 or lines[-1] == f"… and {100 - shown} more"
    assert shown == 100 or height <= 12 or len(lines) == height


def test_an_eighty_by_twenty_four_terminal_shows_a_dozen_of_a_hundred_workers() -> None:
    lines = drawn(watched(status(workers=crew(100))), 80, 24)
    assert names(lines) == [f"worker-{number}" for number in range(12)]
    assert lines[-1] == "… and 88 more"
    assert len(lines) == 24


def test_workers_that_are_off_are_counted_where_there_is_no_room_for_them() -> None:
    workers = [*crew(98), worker("worker-98", loss=NAN), worker("worker-99", lease_remaining_seconds=1.0)]
    assert drawn(watched(status(workers=workers)), 80, 24)[-1] == "… and 88 more  ! 2 of them abnormal"


def test_only_the_rows_that_fit_are_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted: list[str] = []
    cells = Picture._cells

    def counted(self: Picture, worker: pb.WorkerStatus, workers: int) -> dict[str, tuple[str, bool]]:
        formatted.append(worker.name)
        return cells(self, worker, workers)

    monkeypatch.setattr(Picture, "_cells", counted)
    drawn(watched(status(workers=crew(500))), 80, 24)
    assert 0 < len(formatted) < 24


def test_every_worker_is_there_where_the_height_has_no_end() -> None:
    assert len(names(drawn(watched(status(workers=crew(100))), height=None))) == 100


@pytest.mark.parametrize("width", [20, 40, 60, 80, 81, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = "a-rather-long-name-" * 6
    workers = [worker(long, commits=10**9, staleness=10**6, loss=NAN, lease_remaining_seconds=3600.0), worker("长" * 60)]
    run = status(
        run_id="r" * 30, workers=workers, version=10**12, memory_bytes=10**9, memory_limit_bytes=10**9, training_loss=1e300
    )
    watch = watched(*(status(version=version) for version in range(300)), run)
    watch.missed(ServerUnavailable("why " * 99))
    for height in (24, None):
        assert max(cell_len(line) for line in drawn(watch, width, height)) <= width


def test_a_wide_terminal_has_longer_sparklines_and_whole_names() -> None:
    watch = watched(*(status(version=10 * second, workers=[worker("a" * 40)]) for second in range(150)))
    narrow, wide = (line_of(drawn(watch, width), "commits/s").count("▄") for width in (80, 200))
    assert 10 <= narrow < 20
    assert 70 <= wide < 80
    assert any(line.startswith("a" * 40 + " ") for line in drawn(watch, 200))
    assert drawn(watch, 80)[-1].startswith("a" * 18 + "… ")


def test_a_narrow_terminal_has_fewer_columns_but_shows_what_is_off() -> None:
    line = line_of(drawn(watched(status(workers=[worker("worker-0"), worker("worker-1", staleness=9)])), 60), "worker-1")
    assert re.fullmatch(r"worker-1 +0 +– +! 9 +– +60 s", line)


def test_each_worker_shows_how_its_last_commit_came() -> None:
    ways = ["memory", "tcp", "tls", "grpc", ""]
    lines = drawn(watched(status(workers=[worker(f"worker-{number}", transport=way) for number, way in enumerate(ways)])))
    shown = [re.split(r" +", line_of(lines, f"worker-{number}"))[-3] for number in range(len(ways))]
    assert shown == ["memory", "tcp", "tls", "grpc", "–"]


def test_long_names_take_the_room_of_the_least_important_column() -> None:
    """Containers are named by their id and the process's number, 14 characters."""
    lines = drawn(watched(status(workers=[worker("9f2d7a6c1e3b-1", transport="tcp")])))
    assert re.fullmatch(r"worker +commits commits/s staleness median π +loss +via +lease", lines[-2])
    assert lines[-1].startswith("9f2d7a6c1e3b-1 ")


# -- no response


def test_before_the_first_answer_there_is_only_the_error() -> None:
    watch = Watch(2.0)
    watch.missed(ServerUnavailable("connection\nrefused"))
    assert drawn(watch, now=9.4) == ["! no response for 7 s: connection refused"]


def test_without_an_answer_the_last_picture_stays_greyed_below_the_error() -> None:
    watch = watched(status(workers=crew(2)))
    before = drawn(watch)
    watch.missed(ServerUnavailable("gone"))
    assert drawn(watch, now=13.0) == ["! no response for 12 s: gone", *before]
    page = io.StringIO()
    Console(file=page, width=80, force_terminal=True, color_system="standard").print(
        Picture(watch, "host:1", "name").draw(80, None, 13.0)
    )
    assert all(re.match(r"\x1b\[(\d;)*?(1;)?2[;m]", line) for line in page.getvalue().splitlines()[1:])


def test_an_answer_ends_the_error() -> None:
    watch = watched(status())
    watch.missed(ServerUnavailable("gone"))
    watch.saw(status(), 5.0)
    assert "no response" not in "".join(drawn(watch))


def test_what_a_run_has_set_beside_its_rule_is_shown() -> None:
    settings = Hyperparameters(
        rule="agn", local_steps=4, schedule="step", decay_versions=100, decay_factor=0.5, weight_decay=0.01
    )
    (line,) = [
        line for line in drawn(watched(status(hyperparameters=settings.to_message())), width=140) if line.startswith("agn")
    ]
    assert line == "agn, η 0.05, batch 64, partition, local λ 4 steps, decay 0.01·θ, schedule ×0.5 every 100 versions"
