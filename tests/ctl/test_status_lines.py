"""The lines of gem-ctl status: how wide they are, and what they say of a run that has not begun."""

from __future__ import annotations

import pytest
from gem_api.hyperparameters import DECLARATIONS, Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_ctl import text
from rich.cells import cell_len


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("longest", [8, 14, 30, 128])
def test_rows_and_curves_fit_the_terminal(width: int, longest: int) -> None:
    names = [f"{'n' * (longest - 2)}-{number}" for number in range(3)] + ["ワーカー" * (longest // 8)]
    workers = [pb.WorkerStatus(name=name, commits=12345, staleness=99, loss=2.5, transport="memory") for name in names]
    run = pb.GetStatusResponse(workers=workers, curves=pb.RunCurves(loss=[1.0] * 400))
    lines = text.status(run, width=width).splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("worker"))
    curve = next(line for line in lines if line.startswith("loss"))
    assert all(cell_len(line) <= width for line in [*lines[header:], curve])
    assert len(set(lines[header:])) == 5  # a name that is cut still differs from the others
    assert {cell_len(line) for line in lines[header:]} == {cell_len(lines[header])}
    assert {"commits", "median", "loss"} <= set(lines[header].split())


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (96, "pace share waited shards rejected via lease | 0.512 s 0.25 1.5 s 0 0 memory 59 s"),
        (80, "pace share rejected via lease | 0.512 s 0.25 0 memory 59 s"),
        (60, "pace share | 0.512 s 0.25"),
    ],
)
def test_a_worker_shows_its_pace_its_share_and_what_its_replies_waited(width: int, shown: str) -> None:
    worker = pb.WorkerStatus(
        name="worker-0", commits=12, loss=2.5, pace_seconds=0.512, batch_share=0.25, waited_seconds=1.5, transport="memory",
        lease_remaining_seconds=59,
    )  # fmt: skip
    _, header, row = text.status(pb.GetStatusResponse(workers=[worker]), width=width).rsplit("\n", 2)
    assert " | ".join(" ".join(line.split()) for line in (header.split("loss")[1], row.split("2.5000")[1])) == shown


@pytest.mark.parametrize("width", range(1, 12))
def test_a_terminal_of_few_columns_gets_lines_too(width: int) -> None:
    run = pb.GetStatusResponse(workers=[pb.WorkerStatus(name="worker-0"), pb.WorkerStatus(name="ワーカー")])
    assert len(text.status(run, width=width).splitlines()) > 3


def test_the_values_of_all_labels_begin_in_one_column() -> None:
    settings = Hyperparameters(optimizer="adamw", optimizer_options="beta2=0.95", batch_variation=0.5, schedule="cosine")
    run = pb.GetStatusResponse(hyperparameters=settings.to_message(), start=pb.Start(seconds=1, at_most_seconds=2))
    lines = text.status(run).splitlines()
    assert "optimizer   adamw:beta2=0.95" in lines
    assert all(line[11] == " " != line[12] for line in lines)
    assert all(len(declared.status[0]) <= 11 for declared in DECLARATIONS.values() if declared.status)


@pytest.mark.parametrize(
    ("start", "workers", "said"),
    [
        (
            pb.Start(min_workers=1, seconds=14.2, at_most_seconds=599.1),
            1,
            "if no other worker joins for 15 s, in 600 s at the latest",
        ),
        (pb.Start(min_workers=4), 3, "once one more worker has joined"),
        (
            pb.Start(min_workers=4, seconds=3, at_most_seconds=9),
            2,
            "if no other worker joins for 3 s, in 9 s at the latest, and once 2 more workers have joined",
        ),
    ],
)
def test_status_says_what_a_new_run_waits_for_and_for_how_long(start: pb.Start, workers: int, said: str) -> None:
    run = pb.GetStatusResponse(start=start, worker_count=workers)
    assert f"begins      {said}" in text.status(run).splitlines()


@pytest.mark.parametrize(
    ("optimizer", "now", "said"),
    [
        ("adamw", 0.003, "learning rate 0.003, batch"),
        ("adamw", 0.0, "learning rate 0.003, now 0, batch"),
        ("sgd", 0.00123456, "learning rate 0.003, now 0.001235, momentum"),
        ("sgd", None, "learning rate 0.003, momentum"),
    ],
)
def test_the_status_tells_the_learning_rate_that_the_schedule_has_reached(optimizer: str, now: float | None, said: str) -> None:
    settings = Hyperparameters(optimizer=optimizer, learning_rate=0.003)
    run = pb.GetStatusResponse(hyperparameters=settings.to_message(), learning_rate=now, parameter_count=9)
    assert said in text.status(run)
    assert "settings" not in text.status(run)
    run.parameter_count = 0
    assert "the first worker may bring an optimizer" in text.status(run), "what is shown need not stay"


@pytest.mark.parametrize(
    ("settings", "shown", "missing"),
    [
        (
            Hyperparameters(
                rule="diloco", rule_options="delay=2 eager=0.1", local_steps=4, local_momentum=0.9, weight_decay=1e-4,
                schedule="cosine", warmup_versions=10, decay_versions=200,
            ),
            [
                "rule        diloco, learning rate 0.05, momentum 0.9, batch 64\n"
                "options     delay=2 eager=0.1\nlocal       λ 4 steps\nnesterov    0.9\nweights     decay 0.0001\n"
                "schedule    warm-up over 10, then cosine to ×0.1 over 200 commits of whole batches\n"
            ],
            ["optimizer"],
        ),
        (Hyperparameters(), ["learning rate 0.05, momentum 0.9"], ["optimizer"]),
        (
            Hyperparameters(optimizer="adamw", learning_rate=0.001, optimizer_options="beta2=0.95", weight_decay=0.01),
            ["learning rate 0.001, batch", "optimizer   adamw", "beta2=0.95", "decay 0.01"],
            ["momentum"],
        ),
        (
            Hyperparameters(optimizer="worker", weight_decay=0.1, local_momentum=0.9, schedule="step", decay_versions=9),
            ["optimizer   worker"],
            ["momentum", "learning rate", "0.1", "0.9", "schedule"],
        ),
    ],
)  # fmt: skip
def test_the_status_tells_what_a_run_has_set_and_only_the_rates_that_count(
    settings: Hyperparameters, shown: list[str], missing: list[str]
) -> None:
    status = text.status(pb.GetStatusResponse(hyperparameters=settings.to_message(), parameter_count=9))
    assert [words for words in shown if words not in status] == []
    assert [words for words in missing if words in status] == []
