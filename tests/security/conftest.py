"""Shared fixtures of the tests with certificates."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.certificates import Authority, Pair
from kit.model import ELSEWHERE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def own(authority: Authority) -> Pair:
    """The server's certificate."""
    return authority.issue("server", hosts=("localhost", "127.0.0.1", ELSEWHERE))
