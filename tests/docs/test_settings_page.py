"""The example of docs/settings.md is a file that the commands take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gem_api.process.options import expanded
from gem_server.cli import main as server
from gem_worker.launcher.cli import main as train
from kit.pages import ROOT

PAGE = ROOT / "docs/settings.md"


@pytest.mark.parametrize("command", [server, train], ids=["gem-server", "gem-train"])
def test_the_example_is_a_file_that_works(command: object, tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.toml").write_text(example, encoding="utf-8")
    options, _ = expanded(command.make_context("command", ["--config", str(tmp_path / "run.toml")]))  # type: ignore[attr-defined]
    assert (options["kappa"], options["optimizer_options"], options["decay_versions"]) == (2.0, "beta2=0.99", 9400)
