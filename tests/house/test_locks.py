"""The pinned packages fit together, and fit the oldest Python that pyproject.toml promises."""

from __future__ import annotations

from collections import defaultdict

import pytest
from kit.locks import LOCKS, pins, refusing


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_every_pinned_package_accepts_the_oldest_python_that_is_promised(lock: str) -> None:
    assert refusing(lock) == []


def test_a_package_has_one_version_in_all_locks() -> None:
    versions: dict[str, set[str]] = defaultdict(set)
    for lock in LOCKS:
        for name, version in pins(lock).items():
            versions[name].add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_training_installs_nothing_that_only_tests_and_benchmarks_need() -> None:
    assert not {"pytest", "ruff", "mypy", "pre_commit", "matplotlib"} & set(pins("requirements.lock"))
