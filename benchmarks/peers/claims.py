"""The claims that the benchmark checks: ratios of rates, with a target for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

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


def peer(rows: dict[str, Row], rule: str, transport: str | None = None) -> Row | None:
    return best(rows.values(), "peer", rule, transport)


def named(rows: dict[str, Row], name: str) -> Row | None:
    return rows.get(name)


_SIZES = (SMALL, MIDDLE, LARGE)


def _claim(text: str, subject: str, against: Selection, *targets: float) -> Claim:
    return Claim(text, subject, against, dict(zip(_SIZES[-len(targets) :], targets, strict=True)))


CLAIMS = (
    _claim("shared memory against the best peer with GEM", "ours-shm", partial(peer, rule="gem"), 4, 5.5, 7),
    _claim("shared memory against the best peer's plain add", "ours-shm", partial(peer, rule="add"), 2, 1.8, 2.8),
    _claim("TCP float32 against the best TCP peer with GEM", "ours-tcp", partial(peer, rule="gem", transport="tcp"), 4, 2.5, 3),
    _claim("TCP float32 against a raw TCP echo", "ours-tcp", partial(named, name="tcp-echo"), 0.6, 0.75, 0.7),
    _claim("TCP bfloat16 against TCP float32", "ours-tcp-bf16", partial(named, name="ours-tcp"), 1.5, 1.6),
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
