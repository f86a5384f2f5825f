"""Tests with engines from requirements-integrations.lock. `make test-all` installs those."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("helm_python") is None:
    collect_ignore_glob = ["test_chart*.py"]
