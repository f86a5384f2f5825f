"""Workers whose number KEDA chooses: what the chart asks Prometheus."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from engines.chart import Object, found, objects
from telemetry.exported import exported, metrics_of

MIN, MAX, WAITING = 2, 64, 0.2
FEWEST = 1.2  # less than MIN workers who compute for 0.8 of their time, more than MIN - 1


def elastic(**config: object) -> list[Object]:
    autoscaling = {"enabled": True, "min": MIN, "waiting": WAITING}
    worker = {"parallelism": MAX, "autoscaling": autoscaling}
    return objects({"worker": worker, "config": config, "metrics": {"serviceMonitor": {"enabled": True}}})


def trigger(of: list[Object]) -> tuple[str, float]:
    """The query and the threshold."""
    (only,) = found(of, "ScaledObject")["spec"]["triggers"]
    assert (only["type"], only["metricType"]) == ("prometheus", "AverageValue")
    return only["metadata"]["query"], float(only["metadata"]["threshold"])


def chosen(value: float, threshold: float, now: int) -> int:
    """What Kubernetes' autoscaler makes of a metric, with the default tolerance."""
    ratio = value / (threshold * max(now, 1))
    wanted = now if abs(ratio - 1) <= 0.1 else math.ceil(round(value / threshold, 3))
    return min(MAX, max(1, wanted))


def test_the_query_names_metrics_and_labels_that_exist() -> None:
    query, _ = trigger(elastic())
    assert metrics_of(query) == {"gem_worker_step_seconds_sum", "gem_run_complete"}
    assert metrics_of(query) <= exported().keys()
    assert "exchange" in exported()["gem_worker_step_seconds_sum"]["phase"]


def test_a_process_of_several_workers_counts_as_many() -> None:
    assert trigger(elastic(workers_per_process=4))[1] == pytest.approx(4 * trigger(elastic())[1])


# -- what Prometheus answers


def sample(name: str, values: str, run: str = "ml/demo", **labels: str) -> Object:
    job = "gem-worker" if "worker" in name else "gem-server"
    named = ", ".join(f'{key}="{value}"' for key, value in {"job": job, "run": run, **labels}.items())
    return {"series": f"{name}{{{named}}}", "values": values}


def busy(worker: str, share: float, run: str = "ml/demo") -> list[Object]:
    """A worker that computes for a share of its time, and exchanges in the rest."""
    shares = {"data": share / 3, "compute": share * 2 / 3, "exchange": 1 - share}
    return [
        sample("gem_worker_step_seconds_sum", f"0+{15 * part}x40", run, pod=worker, phase=phase)
        for phase, part in shares.items()
    ]


OTHERS = [*busy("other", 1.0, "ml/other"), sample("gem_run_complete", "0x40", "ml/other")]
TRAINS, COMPLETE = sample("gem_run_complete", "0x40"), sample("gem_run_complete", "1x40")
FIRST, SECOND = sample("gem_run_complete", "0x40", range="0"), sample("gem_run_complete", "1x40", range="1")
TWO = [*busy("a", 0.9), *busy("b", 0.9)]
CASES: dict[str, tuple[list[Object], float | None]] = {
    "each worker counts by how much it computes": ([*TWO, *busy("c", 0.6), TRAINS], 2.4),
    "a run without workers wants the fewest": ([TRAINS], FEWEST),
    "workers that only wait are not all stopped": ([*busy("a", 0.1), TRAINS], FEWEST),
    "a server that does not answer keeps its workers": (TWO, 1.8),
    "a complete run wants none": ([*TWO, COMPLETE], None),
    "of several servers the first says whether the run is complete": ([*TWO, FIRST, SECOND], 1.8),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_query_counts_the_workers_of_its_run_that_compute(tmp_path: Path) -> None:
    query, _ = trigger(elastic())
    tests = [
        {
            "name": name,
            "interval": "15s",
            "input_series": [*series, *OTHERS],
            "promql_expr_test": [
                {
                    "expr": f"round({query}, 0.001)",
                    "eval_time": "8m",
                    "exp_samples": [{"labels": "{}", "value": value}] if value else [],
                }
            ],
        }
        for name, (series, value) in CASES.items()
    ]
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": tests}), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("least", [1, 2, 3, 7, 50])
def test_the_fewest_workers_are_exactly_those(least: int) -> None:
    autoscaling = {"enabled": True, "min": least, "waiting": 0.3}
    of = objects({"worker": {"parallelism": MAX, "autoscaling": autoscaling}, "metrics": {"serviceMonitor": {"enabled": True}}})
    query, threshold = trigger(of)
    floor = float(query.partition("vector(0),")[2].partition(")")[0])
    assert chosen(floor, threshold, MAX) == least
