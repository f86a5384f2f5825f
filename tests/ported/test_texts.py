"""The text that the language programs train on, which is the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.ported.texts import text, write_characters, write_words


def test_the_words_of_all_parts_are_common_ones(tmp_path: Path) -> None:
    write_words(str(tmp_path), known=300)
    parts = [(tmp_path / f"{name}.txt").read_text().splitlines() for name in ("train", "valid", "test")]
    assert len({word for lines in parts for line in lines for word in line.split()} - {"<unk>"}) == 300
    assert len(parts[0]) > 7 * len(parts[1]) > 0
    assert len(parts[2]) > 0


def test_the_characters_are_those_of_the_text(tmp_path: Path) -> None:
    write_characters(str(tmp_path))
    held_out = np.fromfile(tmp_path / "val.bin", dtype=np.uint16)
    characters = sorted(set(text(0, 450_000)))
    assert "".join(characters[code] for code in held_out[:50]) == text(400_000, 400_050)
