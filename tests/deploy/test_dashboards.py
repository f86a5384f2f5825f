"""The dashboards are up to date, ask for metrics that are exported, and each query is about one run alone.

The committed JSON is the golden file of what Grafana gets. test_dashboards_live.py puts the queries to a real Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from gem_dashboards import boards, queries
from kit.scripts import script
from telemetry.exported import exported, log_registry, metrics_of, worker_registry
from telemetry.test_metrics import after_everything

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
GENERATE = "deploy/grafana/generate.py"
FILES = ROOT / "deploy" / "helm" / "gem" / "files"
BOARDS: dict[str, Any] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((FILES / "dashboards").glob("*.json"))
}
PANELS = {f"{name}: {panel['title']}": panel for name, board in BOARDS.items() for panel in board["panels"]}
ASKING = {where: panel for where, panel in PANELS.items() if panel["type"] != "alertlist"}

# The server's metrics that no dashboard shows, and why.
NOT_SHOWN = {
    "gem_run": "the run's settings as labels: a list, not a curve",
    "gem_build": "the server's versions as labels: a list, not a curve",
    "gem_parameters": "a run has one size of model: gem-ctl status shows it",
    "gem_log_records": "how many are on the disk says little; those that wait are shown",
    "gem_log_stalled": "an alert",
    "gem_checkpoint_failures": "an alert; the age of the last checkpoint is shown",
    "gem_certificate_expiry_timestamp_seconds": "an alert",
    "gem_evaluation_timestamp_seconds": "an alert; the curves of loss and accuracy show when evaluations came",
    "gem_evaluation_version": "an alert; as above",
    "gem_fallen_back_workers": "an alert; the panel of commits by transport shows what comes over gRPC",
    "gem_pi_median": "of the last commit alone; the quantiles of gem_pi are over all commits of an interval",
}


# -- the files


def test_the_committed_dashboards_are_what_generate_would_write() -> None:
    wanted = script(GENERATE).files()
    there = {path: path.read_text(encoding="utf-8") for path in FILES.rglob("*") if path.is_file()}
    assert there.keys() == wanted.keys()
    stale = [path.name for path, text in wanted.items() if there[path] != text]
    assert not stale, f"run `make dashboards`: {stale}"


# -- the panels


def test_every_panel_says_what_good_looks_like() -> None:
    for panel in PANELS.values():
        assert panel["title"]
        assert re.search(r"\bGood\b", panel["description"]), panel["description"]
        assert panel["description"].endswith(".")


# -- the queries


def asked() -> Iterator[tuple[str, str]]:
    """(where, expression) of every query of every dashboard."""
    for where, panel in ASKING.items():
        for target in panel["targets"]:
            yield f"{where}, {target['refId']}", target["expr"]
    for event in boards.EVENTS:
        yield f"event: {event.name}", event.expr


QUERIES = dict(asked())


def test_every_metric_in_a_query_is_one_that_is_exported() -> None:
    for where, expression in QUERIES.items():
        named = metrics_of(expression)
        assert named, where
        assert named - exported().keys() == set(), where


# What follows the metrics of all servers of a run.
OF_RUN = (" " + queries.OF_RUN, " " + queries.ONCE_OF_RUN)


def without_the_choice(expression: str) -> str:
    """An expression without what limits it to the workers and the servers of a run."""
    for choice in (*OF_RUN, " " + queries.SAME_RUN):
        expression = expression.replace(choice, "")
    return expression


def selectors(expression: str) -> Iterator[str]:
    """Every metric of an expression with its matchers."""
    for metric in metrics_of(expression):
        yield from re.findall(rf"(?<![\w:]){metric}(?![\w:])(?:\{{[^}}]*\}})?", expression)


def test_what_every_server_counts_again_is_asked_of_the_one_that_leads() -> None:
    for where, expression in QUERIES.items():
        for metric in selectors(without_the_choice(expression)):
            if 'instance=~"$server"' in metric and not metric.startswith("up{"):
                assert 'range=~"0|"' in metric, f"{where}: {metric}"


def test_what_is_shown_by_range_is_empty_for_a_server_that_holds_everything() -> None:
    for where, expression in QUERIES.items():
        if where.startswith("ranges: ") and not where.startswith("ranges: Alerts"):
            for metric in selectors(without_the_choice(expression)):
                assert 'range!=""' in metric, f"{where}: {metric}"


def test_every_metric_is_shown_on_some_dashboard() -> None:
    shown = {metric for expression in QUERIES.values() for metric in metrics_of(without_the_choice(expression))}
    families = [*after_everything().registry.collect(), *log_registry().collect(), *worker_registry().collect()]
    suffixes = ("", "_total", "_info", "_bucket", "_sum", "_count")
    missing = {family.name for family in families if not shown & {family.name + suffix for suffix in suffixes}}
    assert missing == NOT_SHOWN.keys()


def test_what_is_drawn_against_a_bound_has_a_unit_that_fits() -> None:
    """A share is a percentage, a time is in seconds, bytes are bytes."""
    for where, panel in ASKING.items():
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        names = {metric for target in panel["targets"] for metric in metrics_of(target["expr"])}
        if any(name.endswith(("_accuracy", "_ratio")) for name in names):
            assert unit == "percentunit", where
        names -= metrics_of(queries.OF_RUN)
        if all("_bytes" in name for name in names) and unit != "percentunit":  # one divided by another
            assert unit in ("bytes", "Bps"), where
        if all("_seconds_bucket" in name for name in names):
            assert unit == "s", where


def test_the_colours_of_memory_are_red_when_the_alert_fires() -> None:
    rules = load("deploy", "prometheus", "alerts.yml")["groups"][0]["rules"]
    (expression,) = [rule["expr"] for rule in rules if rule.get("alert") == "GemMemoryNearLimit"]
    red = PANELS["server: Memory in use"]["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
    assert expression.endswith(f"> {red['value']}")


# -- how Grafana and Prometheus find them


@cache
def load(*path: str) -> Any:
    return yaml.safe_load(ROOT.joinpath(*path).read_text(encoding="utf-8"))


def scraped() -> Any:
    return load("deploy", "prometheus", "prometheus.yml")


def service(name: str) -> Any:
    return load("docker-compose.yml")["services"][name]


def mounts(name: str) -> dict[str, str]:
    """A service's mounted folders of this repository: by the path within the container."""
    pairs = [volume.split(":")[:2] for volume in service(name)["volumes"]]
    return {inside: outside for outside, inside in pairs if outside.startswith("./")}


def outside_of(name: str, inside: str) -> Path:
    """The file of this repository that a service finds at a path."""
    for folder, outside in mounts(name).items():
        if PurePosixPath(inside).is_relative_to(folder):
            return ROOT / outside / PurePosixPath(inside).relative_to(folder)
    raise AssertionError(f"{name} mounts nothing at {inside}")


def test_grafana_is_given_the_provisioning_and_the_dashboards() -> None:
    assert outside_of("grafana", "/etc/grafana/provisioning") == GRAFANA / "provisioning"
    (provider,) = load("deploy", "grafana", "provisioning", "dashboards", "gem.yml")["providers"]
    assert provider["type"] == "file"
    assert outside_of("grafana", provider["options"]["path"]) == FILES / "dashboards"


def test_grafanas_home_is_one_of_the_dashboards() -> None:
    home = service("grafana")["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert outside_of("grafana", home).is_file()


def test_grafanas_data_source_is_the_prometheus_of_the_cluster() -> None:
    (source,) = load("deploy", "grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    host = re.fullmatch(r"http://([\w-]+):(\d+)", source["url"])
    assert host is not None
    assert host[1] in load("docker-compose.yml")["services"]
    assert any(port.endswith(f":{host[2]}") for port in service(host[1])["ports"])
    assert source["jsonData"]["manageAlerts"] is True, "else the list of alerts has Grafana's own alone"
    assert source["jsonData"]["timeInterval"] == scraped()["global"]["scrape_interval"]


def test_prometheus_is_given_its_configuration() -> None:
    (flag,) = [word for word in service("prometheus")["command"] if word.startswith("--config.file=")]
    assert outside_of("prometheus", flag.partition("=")[2]) == ROOT / "deploy" / "prometheus" / "prometheus.yml"


def test_prometheus_asks_the_ports_that_the_images_serve_metrics_on() -> None:
    images = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    served = dict(zip(("gem-server", "gem-worker"), re.findall(r"GEM_METRICS_LISTEN=\S+:(\d+)", images), strict=True))
    jobs = {job["job_name"]: job for job in scraped()["scrape_configs"]}
    assert jobs.keys() == served.keys()
    assert jobs["gem-server"]["static_configs"] == [{"targets": [f"server:{served['gem-server']}"], "labels": {"run": "gem"}}]
    assert jobs["gem-worker"]["relabel_configs"] == [{"target_label": "run", "replacement": "gem"}]
    assert load("docker-compose.yml")["name"] == "gem"
    (workers,) = jobs["gem-worker"]["dns_sd_configs"]
    assert (workers["names"], str(workers["port"])) == (["worker"], served["gem-worker"])
    assert {"server", "worker"} <= load("docker-compose.yml")["services"].keys()
