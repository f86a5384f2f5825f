"""examples/notebook.ipynb runs from top to bottom, with the session's card in between.

Without a kernel: that would be 25 more packages, and beside `display` and the value of a cell's last line, which stand here in
IPython's place, the notebook uses none of it: a magic would be a SyntaxError.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.pages import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}


class Screen:
    """What the cells show: HTML of what has it, else the value's `repr`. It is also the handle that `display` returns."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, value: object) -> None:
        html = getattr(value, "_repr_html_", None)
        self.shown.append(html() if html else repr(value))

    def display(self, *values: object, display_id: bool = False) -> Screen | None:
        for value in values:
            self.update(value)
        return self if display_id else None

    @property
    def cards(self) -> list[str]:
        """The texts of the cards."""
        return [re.sub(r"<[^>]+>", " ", html) for html in self.shown if html.startswith("<div")]


def execute(name: str, names: dict[str, Any], screen: Screen) -> None:
    """Runs a cell, and shows the value of its last line if that is an expression."""
    cell = ast.parse(CELLS[name], name)
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, name, "exec"), names)
    if isinstance(last, ast.Expr) and (value := eval(compile(ast.Expression(last.value), name, "eval"), names)) is not None:
        screen.update(value)


def test_it_is_stored_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert len(CELLS) == len(code), "two cells have the same id"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_two_workers_train_the_digits_and_the_card_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    screen = Screen()
    names: dict[str, Any] = {"__name__": "__main__", "display": screen.display}
    try:
        for name in CELLS:
            execute(name, names, screen)
        assert names["server"].returncode == 0, (tmp_path / "runs" / "gem-server.log").read_text(encoding="utf-8")
    finally:
        if "server" in names:
            names["server"].kill()
    session = names["session"]
    versions = [int(re.findall(r"version\s+([\d,]+)", card)[0].replace(",", "")) for card in screen.cards]
    assert len(set(versions)) >= 4, "the card was not drawn during the run"
    assert versions == sorted(versions)
    assert versions[-1] == session.version
    assert re.search(r"complete .* 100 % of the run .* training loss: ", screen.cards[-1]), screen.cards[-1]
    assert 0 < session.steps_done < session.version, "one worker did everything"
    assert not names["other"].is_alive()
    assert names["accuracy"] > 0.9
    saved = torch.load("runs/digits.pt")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in names["model"].state_dict().items())
    assert "this session is closed" in session._repr_html_()
