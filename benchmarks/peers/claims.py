"""The results as text: a table for each model size and number of workers, and the claims: ratios of rates, with targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.peers.results import Cell, Results, Row, best

SMALL, MIDDLE, LARGE = 156_450, 1_000_000, 25_000_000

Selection = Callable[[dict[str, Row]], Row | None]


@dataclass(frozen=True)
class Claim:
    """The claim that `subject` is at least `targets[P]` times as fast as the row that `against` selects. Sizes without a target
    are not claimed."""

    text: str
    subject: str
    against: Selection
    targets: dict[int, float]


_SIZES = (SMALL, MIDDLE, LARGE)


def _claim(text: str, subject: str, against: Selection, *targets: float) -> Claim:
    return Claim(text, subject, against, dict(zip(_SIZES[-len(targets) :], targets, strict=True)))


def _peer(rule: str, transport: str | None = None) -> Selection:
    return lambda rows: best(rows.values(), "peer", rule, transport)


CLAIMS = (
    _claim("shared memory against the best peer with GEM", "ours-shm", _peer("gem"), 4, 5.5, 7),
    _claim("shared memory against the best peer's plain add", "ours-shm", _peer("add"), 2, 1.8, 2.8),
    _claim("TCP float32 against the best TCP peer with GEM", "ours-tcp", _peer("gem", "tcp"), 4, 2.5, 3),
    _claim("TCP float32 against a raw TCP echo", "ours-tcp", lambda rows: rows.get("tcp-echo"), 0.6, 0.75, 0.7),
    _claim("TLS float32 against TCP float32", "ours-tls", lambda rows: rows.get("ours-tcp"), 0.7, 0.7),
    _claim("TCP bfloat16 against TCP float32", "ours-tcp-bf16", lambda rows: rows.get("ours-tcp"), 1.5, 1.6),
)


def verdicts(results: Results) -> Iterable[str]:
    """A line for each claim and cell: the claim, its target, the measured ratio, and whether it meets the target."""
    for claim in CLAIMS:
        for cell in results.cells():
            target = claim.targets.get(cell.parameters)
            if target is not None:
                yield _verdict(claim, cell, target, results.rows(cell))


def _verdict(claim: Claim, cell: Cell, target: float, rows: dict[str, Row]) -> str:
    what = f"{claim.text:48s} P = {cell.parameters:>10,}, W = {cell.workers:2d}: at least {target:4.2f}"
    subject, against = rows.get(claim.subject), claim.against(rows)
    if subject is None or against is None:
        return f"{what}, not measured"
    ratio, lowest, highest = subject.ratio_to(against)
    met = "met" if ratio >= target else "NOT met"
    return f"{what}, measured {ratio:5.2f} ({lowest:.2f}..{highest:.2f}): {met} ({against.label})"


_HEAD = (
    f"{'':42s} {'trips/s':>9s} {'lowest..highest':>17s} {'of best':>8s} {'of its':>7s} {'CPU ms a trip':>15s} "
    f"{'p50':>8s} {'p99':>8s} {'server MiB':>11s}\n"
    f"{'':42s} {'median':>9s} {'of the repeats':>17s} {'peer':>8s} {'floor':>7s} {'server':>7s} {'worker':>7s} "
    f"{'ms':>8s} {'ms':>8s} {'a worker':>11s}"
)


def table(results: Results, cell: Cell) -> str:
    """The contenders of one cell (a model size and a number of workers), the fastest first."""
    rows = results.rows(cell)
    peer = best(rows.values(), "peer", "gem")
    repeats = max(len(row.figures) for row in rows.values())
    title = f"P = {cell.parameters:,}, W = {cell.workers}, {repeats} repeat{'s' if repeats > 1 else ''}"
    title += f"; best peer with GEM: {peer.label}" if peer else "; no peer with GEM was measured"
    return "\n".join([title, _HEAD, *(_line(row, peer, rows.get(row.floor or "")) for row in rows.values())])


def _line(row: Row, peer: Row | None, floor: Row | None) -> str:
    spread = "..".join(rate(value) for value in row.spread)
    return (
        f"{row.label:42s} {rate(row.rate):>9s} {spread:>17s} {_ratio(row, peer):>8s} {_ratio(row, floor):>7s} "
        f"{1e3 * row.median('server_cpu'):7.2f} {1e3 * row.median('worker_cpu'):7.2f} "
        f"{1e3 * row.median('p50'):8.2f} {1e3 * row.median('p99'):8.2f} {row.median('bytes_per_worker') / 2**20:11.1f}"
    )


def _ratio(row: Row, other: Row | None) -> str:
    return f"{row.ratio_to(other)[0]:.2f}" if other else "-"


def rate(value: float) -> str:
    """A rate with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
