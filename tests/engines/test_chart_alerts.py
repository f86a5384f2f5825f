"""The chart's monitors, alerts and dashboards, rendered by Helm: valid, and each release's about its own run alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.test_dashboards import GENERATE
from engines.chart import ROOT
from engines.monitoring import Release, render
from gem_dashboards.boards import DASHBOARDS
from kit.scripts import script
from telemetry.exported import TARGET, exported

PROMETHEUS = ROOT / "deploy" / "prometheus"
# Two releases of one name in two namespaces.
FIRST, SECOND = (render(namespace, "digits") for namespace in ("ml", "research"))
# What the operator's configuration adds to each target.
OPERATORS_LABELS = {"namespace", "service", "pod", "container", "endpoint", "node"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


# -- valid objects


def boards(release: Release) -> list[dict[str, Any]]:
    """The ConfigMaps with dashboards: all but that with the settings."""
    return [one for one in release.all("ConfigMap") if "run.toml" not in one["data"]]


def test_no_metric_has_a_label_that_a_target_has() -> None:
    """Prometheus would rename it, and the alerts and dashboards would ask for a label that is gone."""
    for metric, labels in exported().items():
        assert not labels.keys() & (OPERATORS_LABELS | TARGET), metric


# -- the alerts


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


# -- promtool


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the rules of both releases, as the operator gives them to Prometheus."""
    for name, release in {"first": FIRST, "second": SECOND}.items():
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(release.one("PrometheusRule")["spec"]), encoding="utf-8")
    return tmp_path


def promtool(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def of_release(series: dict[str, Any], release: Release) -> dict[str, Any]:
    """A series of alerts_test.yml with a release's labels."""
    labels = f'run="{release.run}", namespace="{release.namespace}", '
    named = re.sub(r"\b(\w+):9464", rf"{release.run}-gem-\1", series["series"])
    return {**series, "series": named.replace("{", "{" + labels, 1)}


@needs_promtool
@pytest.mark.parametrize("part", range(4))  # each takes a while
def test_each_release_fires_its_own_alerts_alone(files: Path, part: int) -> None:
    """The tests of alerts_test.yml with the first release's labels, while the second release is healthy."""
    text = (PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8")
    suite = yaml.load(text, yaml.BaseLoader)  # as text: 0x60 means 61 zeros to promtool
    healthy = [of_release(one, SECOND) for one in suite["tests"][0]["input_series"]]
    suite["tests"] = suite["tests"][part::4]
    for test in suite["tests"]:
        test["input_series"] = [of_release(one, FIRST) for one in test["input_series"]] + healthy
        for case in test.get("alert_rule_test", []):
            case["exp_alerts"] = [expected(one, case["alertname"]) for one in case["exp_alerts"]]
        for case in test.get("promql_expr_test", []):
            case["exp_samples"] = [
                {"labels": of_release({"series": one["labels"]}, FIRST)["series"], "value": float(one["value"])}
                for one in case["exp_samples"]
            ]
    suite["rule_files"] = ["first.yml", "second.yml"]
    (files / "test.yml").write_text(yaml.safe_dump(suite, allow_unicode=True), encoding="utf-8")
    promtool(files, "test", "rules", "test.yml")


def expected(alert: dict[str, Any], name: str) -> dict[str, Any]:
    """What the first release's alert says, in place of compose's."""
    labels, words = (
        {key: re.sub(r"\b(\w+):9464", r"ml/digits-gem-\1", text) for key, text in part.items()} for part in alert.values()
    )
    if name == "GemServerAbsent":
        words["summary"] += " of the run ml/digits"
    return {"exp_labels": {**labels, "run": "ml/digits", "namespace": "ml"}, "exp_annotations": words}


# -- the dashboards


def test_the_dashboards_are_config_maps_that_grafanas_sidecar_finds() -> None:
    files = {name for one in boards(FIRST) for name in one["data"]}
    assert files == {f"{board.uid}.json" for board in DASHBOARDS}
    for one in boards(FIRST):
        ((name, text),) = one["data"].items()
        source = ROOT / "deploy" / "helm" / "gem" / "files" / "dashboards" / name.removeprefix("gem-")
        assert text == source.read_text(encoding="utf-8").strip()
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(text.encode()) < 1 << 18, "kubectl apply keeps a copy of at most 256 KiB"


def test_a_release_fits_into_the_secret_that_helm_keeps_it_in() -> None:
    """1 MiB. Helm stores the chart and what it renders, compressed."""
    everything = sum(path.stat().st_size for path in (ROOT / "deploy" / "helm" / "gem").rglob("*") if path.is_file())
    assert everything + sum(len(str(one)) for one in FIRST.objects) < 1 << 20
