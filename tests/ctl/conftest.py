"""Shared fixtures of the operator's tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ctl.fake_prometheus import FakePrometheus


@pytest.fixture
def fake() -> Iterator[FakePrometheus]:
    prometheus = FakePrometheus()
    yield prometheus
    prometheus.close()
