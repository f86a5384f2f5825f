"""The guide to the trainers runs as it is printed, and what it describes is documented and pinned."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import gem_client.lightning
import gem_client.transformers
import pytest
from docs.test_code_blocks import WITH_TRAINERS, complete, run
from gem_api.hyperparameters import Hyperparameters
from house.test_public_api import is_documentable, members, undocumented_parameters
from kit.pages import Block, blocks
from kit.server import config, serving

BLOCKS = [block for block in blocks(language="python", folder="docs/guides") if block.page == WITH_TRAINERS]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_of_the_guide_completes_a_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(config(Hyperparameters(epochs=2, shard_size=256))) as live:
        run(block, {"__name__": __name__}, live.address)
        assert complete(live)


MODULES = [gem_client.lightning, gem_client.transformers]


def test_the_modules_export_these_names() -> None:
    assert [module.__all__ for module in MODULES] == [["GemCallback"], ["GemTrainerMixin"]]


PUBLIC: dict[str, Any] = {name: value for module in MODULES for name, value in members(module) if is_documentable(value)}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text, f"{name} has no docstring"
    if inspect.isclass(PUBLIC[name]) or name.endswith(".loader"):  # the others override what the libraries document
        assert undocumented_parameters(PUBLIC[name], text) == [], name
