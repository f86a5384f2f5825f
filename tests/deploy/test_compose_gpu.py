"""deploy/compose.gpu.yml: who gets the GPUs, and what they compute on. The tests only read it; no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gem_worker.device import devices

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.gpu.yml").read_text(encoding="utf-8"))["services"]


def test_workers_and_the_evaluator_get_the_gpus_and_the_server_does_not() -> None:
    assert SERVICES.keys() == {"worker", "evaluator"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_gets_all_gpus_and_uses_them_unless_told_otherwise(service: str) -> None:
    (reserved,) = SERVICES[service]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    variable, _, default = SERVICES[service]["environment"]["GEM_DEVICE"].strip("${}").partition(":-")
    assert variable == "GEM_DEVICE"
    assert devices(default), "not a value of --device"
