"""Each worker's contribution to a run: by the history, and by what the server said of it last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gem_api.process.option_types import times
from gem_api.v1 import training_pb2 as pb
from gem_ctl.recorded_commits import RecordedCommits

_SHOWN = 8  # workers that get a line each
_COLUMNS = ("worker", "commits", "batches", "share", "pace", "waited")


def contributions(commits: RecordedCommits, last: Mapping[str, pb.WorkerStatus], batch_size: int) -> dict[str, dict[str, Any]]:
    """By worker: its commits, and the whole batches that their samples are; of its last lease the share, the pace in seconds
    for a whole batch, and the seconds that its replies have waited. None: the server has not said it."""
    totals, found = commits.per_worker, {}
    for name, count, samples in zip(commits.names, totals.commits, totals.samples, strict=True):
        status = last.get(name)
        found[name] = {
            "commits": int(count),
            "batches": round(float(samples) / batch_size, 2),
            "share": status.batch_share if status else None,
            "pace_seconds": (status.pace_seconds or None) if status else None,
            "waited_seconds": status.waited_seconds if status else None,
        }
    return found


def table(each: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each worker; of many the ones with the fewest, the median and the most whole batches."""
    workers = sorted(each.items(), key=lambda worker: -worker[1]["batches"])
    if len(workers) > _SHOWN:
        middle = len(workers) // 2
        chosen = (("most", workers[0]), ("median", workers[middle]), ("fewest", workers[-1]))
        workers = [(f"{name} ({which})", known) for which, (name, known) in chosen]
    rows = [_COLUMNS, *(_row(name, known) for name, known in workers)]
    names, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *cells in rows:
        yield "  ".join([name.ljust(max(13, names)), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])


def instead(batches: float, step_seconds: str, workers: int) -> dict[str, float]:
    """The least seconds that as many whole batches take workers whose gradients have the simulated times: all of them if none
    waits, as here; the fastest alone; and workers in step, each with as many batches, who wait for the slowest of them in each
    step: all, and those `fast_workers` with whom that is soonest over. What exchanges take is left out. Empty if a worker's
    time is not simulated, or all are alike."""
    given = times(step_seconds)
    each = sorted(given[number % len(given)] for number in range(workers))
    if not each[0] or each[0] == each[-1]:
        return {}
    in_step = [round(batches / (place + 1) * seconds, 1) for place, seconds in enumerate(each)]
    fast = in_step.index(min(in_step))
    return {
        "none_waits_seconds": round(batches / sum(1 / seconds for seconds in each), 1),
        "fastest_alone_seconds": in_step[0],
        "fast_workers": fast + 1,
        "fast_in_step_seconds": in_step[fast],
        "all_in_step_seconds": in_step[-1],
    }


def _row(name: str, known: Mapping[str, Any]) -> tuple[str, ...]:
    share, pace, waited = known["share"], known["pace_seconds"], known["waited_seconds"]
    return (
        name,
        f"{known['commits']}",
        f"{known['batches']:.6g}",
        "–" if share is None else f"{share:.3g}",
        "–" if pace is None else f"{pace:.3g} s",
        "–" if waited is None else f"{waited:.3g} s",
    )
