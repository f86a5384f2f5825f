"""The alerts use only exported metrics. Each is explained on the troubleshooting page and tested by promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from gem_api import errors
from telemetry.exported import TARGET, exported, grouped_by, metrics_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

OF_A_RUN = {"job", "run", "run_id"}  # what the servers of one run have in common
OF_NO_SERVER = {"GemServerAbsent", "GemRangeMissing"}  # their servers have no labels
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


RULES = [rule for group in read("alerts.yml")["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
SECTIONS = dict(re.findall(r"^### (Gem.+)\n((?:(?!##+ ).*\n)*)", PAGE, re.MULTILINE))
TESTS = read("alerts_test.yml")["tests"]


def expressions() -> dict[str, str]:
    """Every PromQL expression, by where it stands: those of the rules, and the indented ones of the page."""
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    for alert, text in SECTIONS.items():
        for number, line in enumerate(re.findall(r"^    (.*gem[_:].*)$", text, re.MULTILINE)):
            found[f"{alert}, page {number}"] = line
    return found


EXPRESSIONS = expressions()


def can_have(metric: str, label: str) -> set[str]:
    """The values that a label of a metric can have."""
    if label == "error":
        return {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.GemError)}
    return exported()[metric].get(label, set())


def recorded_or_exported() -> set[str]:
    return exported().keys() | RECORDED.keys()


# -- the rules


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_metric_in_an_expression_is_exported_or_recorded(where: str) -> None:
    named = metrics_of(EXPRESSIONS[where])
    assert named
    assert named - recorded_or_exported() == set()


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_selector_asks_for_labels_and_values_that_exist(where: str) -> None:
    for metric, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", EXPRESSIONS[where]):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            if label == "job":
                assert value in {job["job_name"] for job in read("prometheus.yml")["scrape_configs"]}
            else:
                assert set(value.split("|")) <= can_have(metric, label), f"{metric} never has {label}={value!r}"


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_label_that_is_grouped_or_matched_by_exists(where: str) -> None:
    expression = EXPRESSIONS[where]
    for name in metrics_of(expression) & RECORDED.keys():
        expression += f" + {RECORDED[name]}"
    there = {label for metric in metrics_of(expression) - RECORDED.keys() for label in exported()[metric]}
    assert grouped_by(expression) <= there | TARGET


@pytest.mark.parametrize("name", ALERTS)
def test_no_expression_loses_the_instance_the_range_and_the_run(name: str) -> None:
    """So that one Prometheus can watch several servers, of one run or of several."""
    for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", ALERTS[name]["expr"]):
        kept = {label.strip() for label in labels.split(",")}
        assert kept >= TARGET | {"range"} or kept == OF_A_RUN
    assert not re.search(r"\b(without|ignoring)\b", ALERTS[name]["expr"])
    assert "instance" in ALERTS[name]["annotations"]["summary"] or name in OF_NO_SERVER


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_about_one_range_names_it_and_one_about_the_run_is_asked_of_range_0(name: str) -> None:
    rule = ALERTS[name]
    names_it = "$labels.range" in rule["annotations"]["summary"] or "range!=''" in rule["annotations"]["description"]
    expression = rule["expr"] + "".join(RECORDED.get(metric, "") for metric in metrics_of(rule["expr"]))
    assert names_it or 'range=~"0|"' in expression or name in OF_NO_SERVER


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_how_bad_it_is_what_is_so_and_what_to_do_first(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"].keys() == {"severity"}
    severities = re.sub(r"{{.*?}}", " ", rule["labels"]["severity"]).split()  # a template may choose between them
    assert severities
    assert set(severities) <= {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description"}
    assert re.search(r"\bFirst ", rule["annotations"]["description"])
    assert not re.search("docker compose|kubectl", str(rule["annotations"])), "the page has the commands of each engine"


# -- the page


def test_every_alert_has_a_name_of_its_own_a_section_on_the_page_and_tests() -> None:
    assert len(ALERTS) + len(RECORDED) == len(RULES)
    assert SECTIONS.keys() == ALERTS.keys()
    assert {case["alertname"] for test in TESTS for case in test.get("alert_rule_test", [])} == ALERTS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_says_what_it_means_where_to_look_and_what_to_do(name: str) -> None:
    assert re.findall(r"^\*\*(.+?)\.\*\*", SECTIONS[name], re.MULTILINE) == ["Meaning", "Look", "Do"]


# -- promtool's tests of the rules


def cases_of(name: str, firing: bool) -> list[Any]:
    """The cases that expect an alert to fire, or to be silent."""
    cases = [case for test in TESTS for case in test.get("alert_rule_test", []) if case["alertname"] == name]
    return [case for case in cases if bool(case["exp_alerts"]) == firing]


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_to_fire_and_to_be_silent(name: str) -> None:
    assert cases_of(name, firing=True)
    assert cases_of(name, firing=False)


def test_every_series_in_the_tests_is_one_that_is_exported() -> None:
    for test in TESTS:
        for series in test["input_series"]:
            metric, _, labels = series["series"].partition("{")
            assert metric in exported(), metric
            for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
                assert label in exported()[metric].keys() | TARGET, f"{metric} has no label {label}"
                if label in {"error", "outcome", "reason"}:
                    assert value in can_have(metric, label), f"{metric} never has {label}={value!r}"


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("evaluated_every", ["30s", pytest.param("5s", marks=pytest.mark.long)])
def test_the_alerts_fire_when_they_should_and_only_then(evaluated_every: str, tmp_path: Path) -> None:
    """An evaluation every 5 s is as in production, and takes a minute."""
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    text = (FOLDER / "alerts_test.yml").read_text(encoding="utf-8")
    assert "\nevaluation_interval: 5s\n" in text
    for said in ("evaluation_interval: {}", "Evaluations of this run came every {} before"):  # as a rule has noted
        text = text.replace(said.format("5s"), said.format(evaluated_every))
    (tmp_path / "test.yml").write_text(text, encoding="utf-8")
    promtool("test", "rules", str(tmp_path / "test.yml"))
