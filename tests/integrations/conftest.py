"""Tests with the libraries of requirements-integrations.lock. `make test-all` installs those."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pytorch_lightning") is None:
    collect_ignore_glob = ["test_*.py"]
