"""What the measurements of the server share: options, interleaved repeats, ratios of the same repeat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.lib.measuring import interleaved, measurement, middle, ratio, spread, verdict


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
    assert verdict("a rate", "at least 4", "2.00", False) == "a rate: at least 4, measured 2.00: NOT met"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "(1, 2) 5.0 tcp runs/out.json"),
        (["-P", "7", "--seconds", "1", "--transport", "shm", "--out", "x"], "(7,) 1.0 shm x"),
    ],
)
def test_a_command_has_the_options_that_have_a_default(arguments: list[str], said: str) -> None:
    @measurement(parameters=(1, 2), seconds=5.0, transport="tcp", out=Path("runs/out.json"))
    def main(parameters: tuple[int, ...], seconds: float, transport: str, out: Path) -> None:
        assert isinstance(out, Path)
        print(parameters, seconds, transport, out)

    assert CliRunner().invoke(main, arguments).output.strip() == said
    assert "--workers" not in CliRunner().invoke(main, ["--help"]).output
