"""What a report asks Prometheus: queries about one server, with steps and rate windows that fit the scrapes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from ctl.fake_prometheus import BEGIN, NOW, RUN, FakePrometheus, found
from ctl.parsed_page import DRAWN, HOSTILE, report
from gem_ctl.report import fill_in

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")

NAMES = ["server:9464", "10.0.0.1:9464", "a-b_c:1", "a b", 'a"b', "a\\b", "a\\", "[x].*+?|(y){2}^$", "π:1", HOSTILE]
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def unquoted(literal: str) -> str:
    return re.sub(r"\\(.)", r"\1", literal)


@pytest.mark.parametrize("name", NAMES)
def test_a_query_is_filled_in_for_one_server_and_no_other(name: str) -> None:
    expression = fill_in('rate(x{instance=~"$server", a="b"}[$__rate_interval])', name, 20.4)
    server, other = (unquoted(literal) for literal in LITERAL.findall(expression))
    assert other == "b"
    assert re.fullmatch(server, name)
    assert not any(
        re.fullmatch(server, stranger)
        for stranger in ["", "x", name + "x", name[1:], name.replace(".", "x", 1) if "." in name else ""]
    )
    assert LITERAL.sub("", expression) == "rate(x{instance=~, a=}[20s])"


def test_rates_are_over_a_second_at_least() -> None:
    assert fill_in("[$__rate_interval]", "a", 0.2) == "[1s]"


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_server_gets_out_of_its_quotes(fake: FakePrometheus, name: str) -> None:
    fake.has_run("one", name)
    report(fake, found(fake))
    queries = fake.queries() + fake.queries("query")
    assert len(queries) > len(DRAWN)
    for query in queries:
        outside = LITERAL.sub("", query)
        assert '"' not in outside
        assert "\\" not in outside
        for literal in re.findall(r'instance="((?:[^"\\]|\\.)*)"', query):
            assert unquoted(literal) == name


def test_every_query_of_every_panel_is_asked_once_for_the_time_of_the_run(fake: FakePrometheus) -> None:
    report(fake)
    wanted = [fill_in(query.expr, "server:9464", 20) for panel in DRAWN for query in panel.queries]
    asked = [arguments for what, arguments in fake.asked if what == "query_range" and "ALERTS" not in arguments["query"]]
    assert [arguments["query"] for arguments in asked] == wanted
    assert {(float(arguments["start"]), float(arguments["end"])) for arguments in asked} == {(BEGIN, BEGIN + 600)}


def test_a_long_run_is_drawn_with_few_points(fake: FakePrometheus) -> None:
    report(fake, replace(RUN, begin=NOW - 200_000, end=NOW))
    (step,) = {arguments["step"] for kind, arguments in fake.asked if kind == "query_range"}
    assert float(step) == 500
    assert "[500s]" in "".join(fake.queries())


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 15), ([""], 15), (["5s"], 5), (["1m30s"], 90), (["2s500ms"], 2.5), (["1h"], 3600), (["5s", "10s"], 10), (["?"], 15)],
)
def test_points_are_as_far_apart_as_scrapes(fake: FakePrometheus, spans: list[str], seconds: float) -> None:
    targets = [{"job": "gem-server", "instance": "server:9464"}, {"job": "gem-worker", "instance": "worker:9465"}]
    fake.targets = [{"labels": labels, "scrapeInterval": span} for labels, span in zip(targets, spans, strict=False)]
    assert f"A point every {seconds:.3g} s, rates over {4 * seconds:.3g} s." in "".join(report(fake).of("p"))


def test_every_rate_is_over_several_scrapes_however_rare_they_are(fake: FakePrometheus) -> None:
    fake.targets[0]["scrapeInterval"] = "1m"
    report(fake)
    spans = [int(span) for query in fake.queries() + fake.queries("query") for span in re.findall(r"\[(\d+)s[]:]", query)]
    assert spans
    assert min(spans) >= 240


def test_no_window_is_empty_however_often_prometheus_scrapes(fake: FakePrometheus) -> None:
    fake.targets[0]["scrapeInterval"] = "100ms"
    report(fake, replace(RUN, end=BEGIN + 2))
    assert not [query for query in fake.queries() + fake.queries("query") if re.search(r"\b0s", query)]


def test_targets_that_are_none_of_gems_do_not_make_a_report_coarser(fake: FakePrometheus) -> None:
    """The Prometheus of a whole company scrapes some things every five minutes."""
    fake.targets.append({"labels": {"job": "backup", "instance": "elsewhere:80"}, "scrapeInterval": "5m"})
    assert "A point every 5 s, rates over 20 s." in "".join(report(fake).of("p"))


def test_the_workers_of_another_run_do_not_make_a_report_coarser(fake: FakePrometheus) -> None:
    for run, span in {"ml/a": "10s", "ml/b": "30s"}.items():
        labels = {"job": "gem-worker", "instance": f"{run}-worker", "run": run}
        fake.targets.append({"labels": labels, "scrapeInterval": span})
    assert "A point every 10 s" in "".join(report(fake, replace(RUN, target={"run": "ml/a"})).of("p"))
