"""What the measurements of the server share: options, interleaved repeats, ratios of the same repeat."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lib.measuring import interleaved, middle, ratio, spread, verdict


@dataclass(frozen=True)
class Found:
    rate: float


def test_every_second_repeat_measures_in_reverse_order() -> None:
    order: list[str] = []
    found = interleaved(["a", "b"], 3, lambda kind: order.append(kind) or len(order))  # type: ignore[func-returns-value]
    assert "".join(order) == "abbaab"
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert interleaved([], 3, len) == {}


def test_a_ratio_is_that_of_the_same_repeat() -> None:
    ours, base = [Found(10), Found(30), Found(20)], [Found(10), Found(10), Found(10)]
    assert middle(ours, "rate") == 20
    assert ratio(ours, base) == (2, 1, 3)
    assert spread(ratio(ours, base)) == "2.00 (1.00..3.00)"
    assert verdict("a rate", 4, ratio(ours, base)) == "a rate: at least 4, measured 2.00 (1.00..3.00): NOT met"
    assert verdict("a rate", 2, ratio(ours, base)).endswith(": met")
