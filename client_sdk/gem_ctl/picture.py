"""The picture that gem-ctl top shows: a run, drawn for a terminal of a given size."""

from __future__ import annotations

import io
import math
import re
from typing import Any

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.printable import printable
from gem_api.v1 import training_pb2 as pb
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.styled import Styled
from rich.text import Text

from gem_ctl import text
from gem_ctl.ranges import RangeState, cells, with_lead
from gem_ctl.text import known
from gem_ctl.watch import Watch

SORTS = ("name", "commits", "rate", "staleness", "loss")
_OFF = "bold red"
_STATES = {
    "waiting": "bold yellow",
    "training": "bold green",
    "complete": "bold cyan",
    "draining": "bold yellow",
    "stalled": _OFF,
    "following": "bold green",
}
_COLUMNS = {"commits": 8, "commits/s": 10, "staleness": 10, "median π": 9, "loss": 10, "shards": 7, "via": 7, "lease": 7}
_RANGE_COLUMNS = {"version": 10, "queue": 7, "memory": 24, "state": 12}
_NAME = 16  # names may take this width, or less if all are shorter; if there is no room, columns are left out


class Picture:
    """Draws a watched run.

    Args:
        watch: The run.
        server: The address of its server, to be shown.
        sort: The column to sort the workers by, one of SORTS: names ascending, numbers descending.
    """

    def __init__(self, watch: Watch, server: str, sort: str) -> None:
        self._watch, self._server, self._sort = watch, server, sort

    def draw(self, width: int, height: int | None, now: float) -> RenderableType:
        """Draws the picture, `width` columns wide and at most `height` lines high; None means no limit."""
        watch, status = self._watch, self._watch.status
        if watch.error is None:
            return Group(*(self._run(status, width, height) if status else []))
        why = printable(" ".join(text.error(watch.error).split()))
        notice = _line((f"! no response for {now - watch.answered:.0f} s: {why}".ljust(width), "bold white on red"))
        last = self._run(status, width, height and max(1, height - 1)) if status else []
        return Group(notice, Styled(Group(*last), "dim"))

    def _run(self, status: pb.GetStatusResponse, width: int, height: int | None) -> list[Text]:
        title, progress = [self._title(status, width), _settings(status)], [_progress(status, width)]
        figures = self._figures(status, width)
        ranges = self._ranges(status, width, height and height - len(title + progress + figures) - 3)
        least = len(title + progress + figures + ranges) + 1
        gap = [_line()] if height and height >= least + (4 if ranges else 3) + len(status.workers) else []
        table = self._table(status, width, height and max(1, height - least))
        return title + gap + progress + gap + figures + gap + ranges + (gap if ranges else []) + table

    def _title(self, status: pb.GetStatusResponse, width: int) -> Text:
        state = text.state(status)
        title = _line("run ", (status.run_id, "bold"), "  ", (state.upper(), _STATES.get(state, "bold")))
        title.append(f"  up {text.duration(status.uptime_seconds)}  ")
        server = f"{self._server}, version {printable(status.server_version)}"
        return title.append(server.rjust(width - title.cell_len), "dim")

    def _ranges(self, status: pb.GetStatusResponse, width: int, room: int | None) -> list[Text]:
        """A line for each range, in at most `room` lines; which one it is if this server does not lead. Empty if it holds
        everything."""
        states = with_lead(self._server, status, self._watch.ranges)
        if not states:
            return [_line((f"range {text.place(status)}", "bold yellow"))] if status.range_count > 1 else []
        wrong = sum(bool(state.trouble) for state in states)
        if room is not None and room < 4:
            return [_line((_marked(f"{wrong} of {len(states)} ranges in trouble", bool(wrong)), _OFF if wrong else "dim"))]
        fit = len(states) if room is None or len(states) < room else room - 2
        if fit < len(states):
            states.sort(key=lambda state: (not state.trouble, state.index))
        server = max(6, width - sum(_RANGE_COLUMNS.values()) - 6)
        title = "range " + "server".ljust(server) + "".join(f"{column:>{size}}" for column, size in _RANGE_COLUMNS.items())
        lines = [_line((title.ljust(width), "bold underline")), *(_range_row(state, server, width) for state in states[:fit])]
        hidden = len(states) - fit
        return [*lines, _line((f"… and {hidden} more ranges", "dim"))] if hidden else lines

    def _figures(self, status: pb.GetStatusResponse, width: int) -> list[Text]:
        """Two values per line if there is room; then those that need a line of their own."""
        columns = 2 if width >= 76 else 1
        room = width // columns
        watch, workers, loss = self._watch, len(status.workers), known(status, "training_loss")
        pairs = [
            self._figure("version", str(status.version), room),
            self._figure("samples/s", text.rate(watch.samples.value), room),
            self._figure("commits/s", text.rate(watch.commits.value), room),
            self._figure("loss", text.figure(loss), room, off=_is_off(loss)),
            self._figure("staleness", f"{status.staleness:.1f} ({max(0, workers - 1)} expected)", room),
            self._figure("median π", text.optional(status, "pi_median", ".3f"), room),
            self._figure("queue", str(status.queue_length), room),
            self._figure("commits", f"{status.commits['rejected']} rejected, {status.commits['repeated']} repeated", room),
            self._figure("memory", text.memory(status), room, off=is_full(status)),
            self._figure("checkpoint", text.checkpoint(status), room),
        ]
        stalled = [self._figure("stalled", text.stall(status.stall), width, off=True)] if status.HasField("stall") else []
        return [
            *stalled,
            *(_line().join(pairs[begin : begin + columns]) for begin in range(0, len(pairs), columns)),
            self._figure("evaluation", text.evaluation(status), width, off=_is_off(status.evaluation.loss)),
            self._figure("leases", f"{workers} live; ended: {text.counts(status.leases_ended) or 'none'}", width),
        ]

    def _figure(self, name: str, value: str, room: int, *, off: bool = False) -> Text:
        figure = _line((f"{name:<12}", "dim"), (_marked(value, off), _OFF if off else "bold"))
        if name in self._watch.histories:
            figure.pad_right(max(1, 22 - figure.cell_len))
            points = list(self._watch.histories[name])[-max(1, room - figure.cell_len - 2) :]
            figure.append(text.sparkline(points), "cyan")
        figure.truncate(room, overflow="ellipsis", pad=True)
        return figure

    def _table(self, status: pb.GetStatusResponse, width: int, room: int | None) -> list[Text]:
        """The table of workers, with as many rows as there is room for."""
        workers = sorted(status.workers, key=self._order)
        if not workers:
            return [_line(("no live workers", "bold yellow"))]
        fit = len(workers) if room is None or len(workers) <= room else room - 1
        rows = [(printable(worker.name), self._cells(worker, len(workers))) for worker in workers[:fit]]
        longest = max((cell_len(name) for name, _ in rows), default=0)
        columns = _columns(width - min(longest, _NAME))
        names = max(6, min(longest, width - sum(columns.values())))
        title = "worker".ljust(names) + "".join(f"{column:>{size}}" for column, size in columns.items())
        lines = [
            _line((title.ljust(width), "bold underline")),
            *(_row(name, names, cells, columns) for name, cells in rows),
        ]
        if hidden := workers[fit:]:
            off = sum(any(self._abnormal(worker, len(workers))) for worker in hidden)
            lines.append(_line((f"… and {len(hidden)} more", "dim"), (f"  ! {off} of them abnormal" if off else "", _OFF)))
        return lines

    def _cells(self, worker: pb.WorkerStatus, workers: int) -> dict[str, tuple[str, bool]]:
        """A worker's values by column, and whether each is abnormal."""
        loss, lease = known(worker, "loss"), worker.lease_remaining_seconds
        stale, lost, ending = self._abnormal(worker, workers)
        return {
            "commits": (str(worker.commits), False),
            "commits/s": (text.rate(self._watch.workers[worker.name].value), False),
            "staleness": (str(worker.staleness), stale),
            "median π": (text.optional(worker, "pi_median", ".3f"), False),
            "loss": (text.figure(loss), lost),
            "shards": (str(worker.shards), False),
            "via": (text.via(worker), False),
            "lease": (f"{lease:.0f} s", ending),
        }

    def _abnormal(self, worker: pb.WorkerStatus, workers: int) -> tuple[bool, bool, bool]:
        """Whether a worker's staleness, loss and lease are abnormal. A live worker renews with two thirds of its lease left."""
        stale = worker.staleness > 3 * max(1, workers - 1)
        return stale, _is_off(known(worker, "loss")), worker.lease_remaining_seconds < self._watch.lease / 3

    def _order(self, worker: pb.WorkerStatus) -> Any:
        """Sorts names with worker-2 before worker-10, and numbers descending with NaN first."""
        name = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", worker.name)]
        figure = {
            "name": 0,
            "commits": worker.commits,
            "rate": self._watch.workers[worker.name].value,
            "staleness": worker.staleness,
            "loss": known(worker, "loss"),
        }[self._sort]
        return figure is None, -(math.inf if _is_off(figure) else figure or 0), name


def plain(picture: RenderableType, width: int) -> str:
    """A picture as text without escape codes and trailing blanks."""
    page = io.StringIO()
    Console(file=page, width=width, force_terminal=False, color_system=None).print(picture)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def _line(*parts: str | tuple[str, str]) -> Text:
    safe = [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    return Text.assemble(*safe, no_wrap=True, overflow="ellipsis")


def _marked(value: str, off: bool) -> str:
    """Marks an abnormal value by more than its colour."""
    return f"! {value}" if off else value


def _is_off(figure: float | None) -> bool:
    return figure is not None and not math.isfinite(figure)


def _columns(room: int) -> dict[str, int]:
    """The table's columns and their widths; fewer if they would not fit into the room that the names leave."""
    columns = dict(_COLUMNS)
    for least in ("shards", "via", "median π", "commits"):
        if sum(columns.values()) > room:
            del columns[least]
    return columns


def _row(name: str, names: int, cells: dict[str, tuple[str, bool]], columns: dict[str, int]) -> Text:
    row = _line(name if cell_len(name) <= names else set_cell_size(name, names - 1) + "…")
    row.pad_right(names - row.cell_len)
    for column, size in columns.items():
        value, off = cells[column]
        row.append(f"{_marked(value, off):>{size}}", _OFF if off else "")
    return row


def _range_row(state: RangeState, server: int, width: int) -> Text:
    """A range's line; for one with trouble, what is wrong in place of its figures."""
    own = cells(state)
    address = own["server"] if cell_len(own["server"]) <= server - 1 else set_cell_size(own["server"], server - 2) + "…"
    row = _line(f"{own['range']:<6}{address}")
    row.pad_right(max(0, 6 + server - row.cell_len))
    if state.trouble:
        row.append(" " + _marked(own["state"], True), _OFF)
        row.truncate(width, overflow="ellipsis")
        return row
    full = state.status is not None and is_full(state.status)
    for column, size in _RANGE_COLUMNS.items():
        off = column == "memory" and full
        row.append(f"{_marked(own[column], off):>{size}}", _OFF if off else "")
    return row


def is_full(status: pb.GetStatusResponse) -> bool:
    """Whether a server is close to its memory limit."""
    return bool(status.memory_limit_bytes) and status.memory_bytes > 0.9 * status.memory_limit_bytes


def _settings(status: pb.GetStatusResponse) -> Text:
    own = Hyperparameters.from_message(status.hyperparameters)
    momentum = f", μ {own.momentum:g}" if own.optimizer == "sgd" else ""
    gem = f"{momentum}, κ {own.kappa:g}, π ≤ {own.pi_max:g}, snapshot {own.snapshot}" if own.rule == "gem" else ""
    rate = f", η {own.learning_rate:g}" if own.optimizer != "worker" else ""
    steps = f", {own.steps} steps" if own.steps else ""
    special = "".join(f", {name} {value}" for name, value in text.special(own).items())
    return _line((f"{own.rule}{rate}{gem}, batch {own.batch_size}, {own.shards}{steps}{special}", "dim"))


def _progress(status: pb.GetStatusResponse, width: int) -> Text:
    """The epoch, and the progress of the run if its number of epochs is limited."""
    shards = status.shards
    epoch, samples = f"{text.epoch(shards)}  ", f"  {shards.samples_completed} samples"
    if not shards.epochs:
        return _line(epoch, samples.lstrip())
    # The status has no number of samples per epoch, but it has shards: those of the epochs up to this one are done, held or
    # pending. (With --shards replicate, a worker that is an epoch behind makes this a little too small.)
    each = (shards.completed + shards.leased + shards.pending) / (shards.epoch + 1)
    share = min(1.0, shards.completed / (each * shards.epochs)) if each else 0.0
    percent = f"  {math.floor(100 * share)} %"
    room = max(0, width - len(epoch + percent + samples))
    done = int(room * share)
    return _line(epoch, ("━" * done, "green"), ("─" * (room - done), "dim"), percent, samples)
