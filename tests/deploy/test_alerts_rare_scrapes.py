"""The alerts with a scrape and an evaluation every 30 s, the operator's defaults: every sixth sample of the alerts' tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.test_alerts import FOLDER, needs_promtool, promtool

EVERY = 6  # the tests have a sample every 5 s


def samples(values: str) -> list[str]:
    """A series as promtool writes it, one entry for each sample: 1x2 is three times 1, and 1+2x2 is 1, 3, 5."""
    expanded: list[str] = []
    for part in values.split():
        repeated = re.fullmatch(r"(_|-?[\d.]+(?:e\d+)?)(?:([+-])([\d.]+(?:e\d+)?))?x(\d+)", part)
        if repeated is None:
            expanded.append(part)
            continue
        first, sign, step, count = repeated.groups()
        if first == "_":
            expanded += ["_"] * int(count)
        else:
            each = float(f"{sign}{step}") if step else 0.0
            expanded += [repr(float(first) + each * number) for number in range(int(count) + 1)]
    return expanded


def seldom(values: list[str]) -> list[str]:
    """Every sixth sample. If it is missing, the newest since the one before, so that no mark of a series' end is lost."""
    windows = [values[max(0, at - EVERY + 1) : at + 1] for at in range(0, len(values) + EVERY - 1, EVERY)]
    return [next((value for value in reversed(window) if value != "_"), "_") for window in windows]


def thinned(test: dict[str, Any]) -> dict[str, Any]:
    """A test with every sixth sample, and without what it expects."""
    series = [{**one, "values": " ".join(seldom(samples(one["values"])))} for one in test["input_series"]]
    return {"name": test["name"], "interval": "30s", "input_series": series}


def minutes(span: str) -> float:
    return sum(float(number) * {"s": 1 / 60, "m": 1.0}[unit] for number, unit in re.findall(r"(\d+)([sm])", span))


def rare(test: dict[str, Any]) -> dict[str, Any]:
    """The test with rare scrapes: a healthy run fires nothing, and each alert that fires does so a minute later at most."""
    firing = [case for case in test.get("alert_rule_test", []) if case["exp_alerts"]]
    if not firing:
        return {**thinned(test), "promql_expr_test": test["promql_expr_test"]}
    (name,) = {case["alertname"] for case in firing}
    last = max(minutes(case["eval_time"]) for case in firing)
    wanted = {
        "expr": f'count(count_over_time(ALERTS{{alertname="{name}", alertstate="firing"}}[3h])) >= bool 1',
        "eval_time": f"{round(60 * last) + 60}s",
        "exp_samples": [{"labels": "{}", "value": 1}],
    }
    return {**thinned(test), "promql_expr_test": [wanted]}


@needs_promtool
@pytest.mark.long
def test_the_alerts_hold_with_a_scrape_every_30_seconds(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    suite = yaml.load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    assert len(suite["tests"]) > 15
    tests = [rare(test) for test in suite["tests"]]
    text = yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "30s", "tests": tests}, allow_unicode=True)
    (tmp_path / "test.yml").write_text(text, encoding="utf-8")
    promtool("test", "rules", str(tmp_path / "test.yml"))
