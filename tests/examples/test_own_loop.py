"""The example of a loop of one's own: the diff that its page shows, and that one worker trains as the loop does alone."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from difflib import unified_diff

import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from kit.model import version
from kit.pages import ROOT, blocks
from kit.server import config, serving

FOLDER = ROOT / "examples" / "own_loop"
ADDRESS = "127.0.0.1:50051"  # what the loops print; tests that run side by side need a free port instead
ENDLESS = Hyperparameters(epochs=0, steps=10_000)


def diff(before: str, after: str) -> list[str]:
    """The changed lines of two files, with a line of context around each change."""
    old, new = ((FOLDER / name).read_text(encoding="utf-8").splitlines() for name in (before, after))
    return [line for line in unified_diff(old, new, n=1, lineterm="") if not line.startswith(("---", "+++", "@@"))]


def trained(script: str, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs a loop as it is printed; the held-out loss after each of its epochs."""
    monkeypatch.setattr(sys, "argv", [script])
    path = FOLDER / script
    exec(compile(path.read_text(encoding="utf-8").replace(ADDRESS, address), str(path), "exec"), {"__name__": "__main__"})
    return [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]


def test_the_page_shows_the_real_diffs() -> None:
    printed = [block.text.splitlines() for block in blocks(language="diff", folder="examples/own_loop")]
    assert printed == [diff("plain.py", "with_gem.py"), diff("plain.py", "on_server.py")]
    changed = [line for line in printed[0] if line[0] in "+-"]
    assert [line[0] for line in changed] == ["+", "+", "+"], "three lines, as the page says"


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        ("with_gem.py", replace(ENDLESS, rule="gem")),
        ("with_gem.py", replace(ENDLESS, rule="downpour")),
        ("on_server.py", replace(ENDLESS, rule="gem")),
        ("on_server.py", replace(ENDLESS, rule="downpour")),
    ],
    ids=["worker gem", "worker downpour", "server gem", "server downpour"],
)
def test_one_worker_trains_as_the_loop_does_alone(
    script: str, settings: Hyperparameters, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed changes the last loss by 0.01 to 0.06; the order of a few operations by far less."""
    torch.set_num_threads(1)
    alone = trained("plain.py", "", capsys, monkeypatch)
    with serving(config(settings)) as live:
        ours = trained(script, live.address, capsys, monkeypatch)
        assert version(live) == 23 * len(ours), "a commit for every batch"
    assert len(ours) == len(alone) == 12
    assert ours[-1] == pytest.approx(alone[-1], abs=0.001)
    assert ours[-1] < 0.3
