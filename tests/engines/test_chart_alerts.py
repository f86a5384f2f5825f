"""The chart's monitors, alerts and dashboards, rendered by Helm: each release's are about its own run alone.

Two releases of one name, in two namespaces, are two runs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from deploy.test_dashboards import GENERATE
from engines.chart import METRICS, ROOT, Object, found, objects
from gem_dashboards.boards import DASHBOARDS
from kit.scripts import script
from telemetry.exported import TARGET, exported, metrics_of

# What the operator's configuration adds to each target.
OPERATORS_LABELS = {"namespace", "service", "pod", "container", "endpoint", "node"}


@pytest.fixture(params=["ml", "research"])
def release(request: pytest.FixtureRequest) -> tuple[list[Object], str]:
    """The release `digits` in a namespace with all of its metrics on, and its run."""
    return objects(METRICS, "digits", request.param), f"{request.param}/digits"


def test_no_metric_has_a_label_that_a_target_has() -> None:
    """Prometheus would rename it, and the alerts and dashboards would ask for a label that is gone."""
    for metric, labels in exported().items():
        assert not labels.keys() & (OPERATORS_LABELS | TARGET), metric


def test_every_target_and_every_selector_of_an_alert_has_the_label_of_the_run(release: tuple[list[Object], str]) -> None:
    of, run = release
    for kind, endpoints, job in (
        ("ServiceMonitor", "endpoints", "gem-server"),
        ("PodMonitor", "podMetricsEndpoints", "gem-worker"),
    ):
        (endpoint,) = found(of, kind)["spec"][endpoints]
        given = {each["targetLabel"]: each.get("replacement") for each in endpoint["relabelings"]}
        assert given == {"job": job, "run": run, "instance": None}
        assert given.keys() == TARGET
    for group in found(of, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            for metric in metrics_of(rule["expr"]):
                uses = re.findall(rf"(?<![\w:]){metric}(?![\w:])(.{{0,40}})", rule["expr"])
                assert all(use.startswith(f'{{run="{run}"') for use in uses), rule["expr"]


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("up == 0", 'up{R} == 0'),
        ('x{a="{y}"} offset 10m', 'x{R, a="{y}"} offset 10m'),
        ("sum by (a) (rate(x[5m])) > 1e9", "sum by (a) (rate(x{R}[5m])) > 1e9"),
        ("x / on (b) group_left (c) max(y:z{})", "x{R} / on (b) group_left (c) max(y:z{R})"),
        ("sum without (a) (x) unless abs(x) < Inf", "sum without (a) (x{R}) unless abs(x{R}) < Inf"),
        ('label_replace(x, "by", "what is up", "", "")', 'label_replace(x{R}, "by", "what is up", "", "")'),
    ],
)  # fmt: skip
def test_a_matcher_is_added_to_each_selector(expression: str, wanted: str) -> None:
    assert script(GENERATE).limited(expression, "R") == wanted


def test_the_dashboards_are_config_maps_that_grafanas_sidecar_finds(release: tuple[list[Object], str]) -> None:
    boards: list[Any] = [one for one in release[0] if one["kind"] == "ConfigMap" and "run.toml" not in one["data"]]
    assert {name for one in boards for name in one["data"]} == {f"{board.uid}.json" for board in DASHBOARDS}
    for one in boards:
        ((name, text),) = one["data"].items()
        source = ROOT / "deploy" / "helm" / "gem" / "files" / "dashboards" / name.removeprefix("gem-")
        assert text == source.read_text(encoding="utf-8").strip()
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(text.encode()) < 1 << 18, "kubectl apply keeps a copy of at most 256 KiB"


def test_a_release_fits_into_the_secret_that_helm_keeps_it_in(release: tuple[list[Object], str]) -> None:
    """1 MiB. Helm stores the chart and what it renders, compressed."""
    everything = sum(path.stat().st_size for path in (ROOT / "deploy" / "helm" / "gem").rglob("*") if path.is_file())
    assert everything + sum(len(str(one)) for one in release[0]) < 1 << 20
