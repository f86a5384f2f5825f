"""Builds the images once for all tests of this folder."""

from __future__ import annotations

import pytest
from containers.project import Project


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    Project().run("build", "server", "worker", timeout=1500)
