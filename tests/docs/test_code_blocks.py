"""Every block of Python in the README, the guides and the rules page runs as it is printed, against a real server."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gem_client
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import Admin
from gem_client.torch import Optimizer, ShardSampler, update_statistics
from kit.model import in_background
from kit.pages import ROOT, Block, blocks
from kit.server import DEADLINE, Live, config, serving
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

DEFAULT_ADDRESS = "127.0.0.1:50051"  # what the pages print; tests that run side by side need a free port instead
README = next(iter(block for block in blocks(language="python") if block.page == ROOT / "README.md"))
PAGES: dict[Path, list[Block]] = {}
WITH_TRAINERS = ROOT / "docs/guides/trainers.md"  # tests/integrations runs it, and what has to do with Keras
for printed in [*blocks(language="python", folder="docs/guides"), *blocks(language="python", folder="docs/rules.md")]:
    if printed.page != WITH_TRAINERS and "keras" not in printed.text:
        PAGES.setdefault(printed.page, []).append(printed)


def run(block: Block, names: dict[str, Any], address: str) -> None:
    """Executes a block, with the address of a running server in place of the printed one."""
    lines_before = "\n" * block.line
    exec(
        compile(lines_before + block.text.replace(DEFAULT_ADDRESS, address), str(block.page), "exec", dont_inherit=True), names
    )


def complete(live: Live) -> bool:
    """Whether every sample of every epoch was trained on."""
    return bool(live.on_loop(lambda: live.core.complete))


def training_loss(live: Live) -> float:
    with Admin(live.address) as admin:
        return admin.status().training_loss


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}  # as a script
    for block in PAGES[page]:
        with serving(config(Hyperparameters(epochs=1, shard_size=256))) as live:
            run(block, names, live.address)
            if "range(200)" in block.text:  # NumPy's loops
                assert training_loss(live) < 0.01, f"{block} does not learn"
            if ".shards(" in block.text or "ShardSampler(" in block.text:
                assert complete(live), f"{block} left the run incomplete"


def test_the_loop_that_a_script_for_ddp_becomes_completes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [each for each in blocks(language="diff", folder="docs/guides") if "-sampler = DistributedSampler" in each.text]
    kept = "".join(line[1:] for line in block.text.splitlines(keepends=True) if not line.startswith("-"))
    kept = kept.replace("num_workers=2", "num_workers=0")  # tests/client has a loader with processes
    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    names: dict[str, Any] = {
        "gem_client": gem_client,
        "torch": torch,
        "Optimizer": Optimizer,
        "ShardSampler": ShardSampler,
        "update_statistics": update_statistics,
        "DataLoader": DataLoader,
        "CosineAnnealingLR": CosineAnnealingLR,
        "epochs": 1,
        "device": torch.device("cpu"),
        "data": TensorDataset(x, torch.sin(x)),
        "make_model": lambda: nn.Sequential(nn.Linear(1, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1)),
        "loss_of": nn.functional.mse_loss,
        "validate": lambda model: None,
    }
    monkeypatch.chdir(tmp_path)
    with serving(config(Hyperparameters(epochs=1, shard_size=256))) as live:
        run(block._replace(text=kept), names, live.address)
        assert complete(live)
    assert (tmp_path / "model.pt").exists(), "the one worker is the one to save"


def test_the_page_of_unusual_programs_shows_lines_of_the_examples() -> None:
    page = ROOT / "docs/guides/unusual-programs.md"
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples/unusual").glob("*.py")]
    lines = {line.partition("  # ")[0].strip() for text in texts for line in text.splitlines()}
    shown = [line.strip() for block in blocks(language="py") if block.page == page for line in block.text.splitlines()]
    assert len(shown) > 10
    assert [line for line in shown if line not in lines] == []


def test_the_readmes_worker_is_short_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, on one run: what the README tells its reader to do."""
    assert len(README.text.splitlines()) < 30
    output: list[list[str]] = [[], []]
    with serving(config(Hyperparameters(epochs=10, shard_size=256))) as live:
        monkeypatch.setattr(sys, "argv", ["worker.py", live.address])
        for worker in [in_background(partial(run, README, {"print": lines.append}, live.address)) for lines in output]:
            worker.result(DEADLINE)
        for *losses, last in output:
            assert all(re.fullmatch(r"epoch \d+, version \d+: loss \d\.\d{4}", line) for line in losses)
            assert re.fullmatch(r"done at version \d+: validation loss 0\.\d{4}", last)
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == 10 * 2048
        assert complete(live)
        assert training_loss(live) < 0.1


def test_the_readme_is_a_screen_and_a_half() -> None:
    assert len(README.page.read_text(encoding="utf-8").splitlines()) < 120


@pytest.fixture(autouse=True)
def few_threads() -> Any:
    """Small models train faster on one thread than on all of a busy machine's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
