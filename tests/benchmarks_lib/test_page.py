"""Tables of the result pages."""

from __future__ import annotations

from benchmarks.lib.page import count, table


def test_a_table_is_markdown() -> None:
    assert table(["n", "", "Rule"], [[1, "–", "gem"], [2, "", "agn"]]).splitlines() == [
        "| n | | Rule |",
        "|---|---|---|",
        "| 1 | – | gem |",
        "| 2 | | agn |",
    ]


def test_one_worker_is_no_plural() -> None:
    assert [count(1), count(2), count(3, "seed")] == ["1 worker", "2 workers", "3 seeds"]
