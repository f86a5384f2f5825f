"""Scripts of this repository that are in no package, as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from kit.pages import ROOT


def script(path: str) -> ModuleType:
    """The module of a script, whose path begins at the repository's top folder."""
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
