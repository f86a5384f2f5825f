"""The results as text: a table for each model size and number of workers."""

from __future__ import annotations

from benchmarks.peers.results import Cell, Results, Row, best

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
