"""The benchmarks' stored results: written completely or not at all, found again, and readable by line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.results import DamagedError, Store, plain, restored, write


@dataclass(frozen=True)
class Settings:
    workers: int
    rate: float = 0.1


ONE, TWO = Settings(1), Settings(2, 0.5)
HEAD = {"format": 1, "conditions": {"cores": 2}}


def stored(path: Path, head: dict[str, Any] | None = None) -> Store[Settings, float]:
    return Store(path, "settings", Settings, lambda loss: {"loss": plain(loss)}, lambda _, row: row["loss"], head)


@pytest.mark.parametrize("head", [None, HEAD])
def test_results_are_saved_at_once_and_found_again(tmp_path: Path, head: dict[str, Any] | None) -> None:
    path = tmp_path / "new" / "results.json"
    stored(path, head).add(ONE, 1.5)
    stored(path, head).add(TWO, math.inf)
    again = stored(path, head)
    assert again == {ONE: 1.5, TWO: None}
    assert again.get(Settings(3)) is None
    assert len([line for line in path.read_text().splitlines() if "workers" in line]) == 2, "a line for each"
    assert list(path.parent.iterdir()) == [path]


def test_what_another_process_has_saved_meanwhile_is_kept(tmp_path: Path) -> None:
    mine, other = stored(tmp_path / "results.json"), stored(tmp_path / "results.json")
    other.add(ONE, 1.5)
    mine.add(TWO, 2.5)
    assert stored(mine.path) == {ONE: 1.5, TWO: 2.5}


def test_the_head_is_that_of_the_first_results(tmp_path: Path) -> None:
    stored(tmp_path / "results.json", HEAD).add(ONE, 1.5)
    assert stored(tmp_path / "results.json", {**HEAD, "conditions": {"cores": 64}}).head == HEAD


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1}', '{"format": 9, "conditions": {}, "runs": []}',
     '{"format": 1, "conditions": {}, "runs": [{"settings": {"unknown": 1}}]}'],
)  # fmt: skip
def test_a_damaged_file_is_an_error_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(DamagedError, match=r"results\.json can't be read .*: restore it"):
        stored(tmp_path / "results.json", HEAD)


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write(path, "before")

    def interrupted(self: Path, text: str, **options: Any) -> int:
        with self.open("w") as file:
            file.write(text[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, "after")
    assert path.read_text() == "before"


def test_numbers_have_few_digits_and_what_json_lacks_is_none() -> None:
    assert [plain(each, 3) for each in (math.pi, 12345.0, math.nan, -math.inf, None)] == [3.14, 12300.0, None, None, None]
    back = restored({"loss": None, "accuracy": None, "rare": 0.5}, loss=math.inf)
    assert (back["loss"], math.isnan(back["accuracy"]), back["rare"]) == (math.inf, True, 0.5)
