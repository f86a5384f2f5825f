"""The report's page: what it shows of a run, safe against hostile names, complete in one file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ctl.fake_prometheus import BEGIN, NOW, RUN, FakePrometheus
from ctl.parsed_page import DRAWN, HOSTILE, Parsed, report
from gem_ctl.report import Run, page

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")
READABLE = {"rule": "gem", "learning rate": "0.05", "momentum": "0.9"}


@pytest.fixture(scope="module")
def full() -> Iterator[str]:
    """The report of a run that there is data of for every panel."""
    fake = FakePrometheus()
    fake.holds_everything()
    yield page(fake.client, RUN, NOW)
    fake.close()


def test_a_report_shows_every_panel_with_its_title_and_explanation(full: str) -> None:
    shown = Parsed(full)
    assert shown.of("h3") == [panel.title for panel in DRAWN]
    assert shown.count("svg") == len(DRAWN)
    for panel in DRAWN:
        assert panel.description in shown.of("p")
    assert shown.of("title") == ["GEM run one"]
    assert shown.of("h1") == ["Run one"]


def test_the_settings_are_listed(fake: FakePrometheus) -> None:
    shown = report(fake)
    assert dict(zip(shown.of("dt"), shown.of("dd"), strict=True)) == READABLE


def test_the_tiles_show_the_run_in_figures(fake: FakePrometheus) -> None:
    fake.numbers = {
        "gem_evaluation_accuracy": "0.98765",
        "gem_training_loss": "0.123456",
        "gem_central_version": "12345",
        "gem_commit_staleness_sum": "2.96",
        "gem_pi_sum": "0.5",
    }
    shown = report(fake)
    assert shown.of("b") == ["98.77%", "0.1235", "12,345", "3.0", "0.500"]


def test_the_models_size_the_versions_and_the_workers_are_shown(fake: FakePrometheus) -> None:
    fake.numbers = {"gem_parameters": "156450"}
    fake.vectors = {
        "gem_build_info": [
            ({"__name__": "gem_build_info", "instance": "server:9464", "version": "1.2", "python": "3.11.7"}, "1")
        ],
        "gem_worker_commits_total": [
            ({"worker": "worker-10"}, "1200"),
            ({"worker": "worker-2"}, "0"),
            ({"worker": "<b>"}, "5"),
        ],
        "gem_worker_staleness_total": [({"worker": "worker-10"}, "3000"), ({"worker": "worker-2"}, "0")],
        "gem_worker_rejected_total": [({"worker": "worker-2"}, "3")],
    }
    shown = report(fake)
    assert shown.of("b") == ["156,450"]
    assert dict(zip(shown.of("dt"), shown.of("dd"), strict=True)) == {**READABLE, "gem-ps": "1.2", "python": "3.11.7"}
    cells = shown.of("td")
    rows = [cells[start : start + 4] for start in range(0, len(cells), 4)]
    assert rows == [["<b>", "5", "–", "0"], ["worker-2", "0", "–", "3"], ["worker-10", "1,200", "2.5", "0"]]
    assert shown.of("h2") == ["Settings", "Versions", "Workers"]


def test_the_staleness_expected_of_no_workers_is_not_negative() -> None:
    (expected,) = [query.expr for panel in DRAWN for query in panel.queries if query.legend.startswith("expected: workers")]
    assert re.fullmatch(r"clamp_min\(.* - 1, 0\)", expected)


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf"])
def test_a_tile_without_a_number_is_left_out(fake: FakePrometheus, number: str) -> None:
    fake.numbers = {"gem_training_loss": number, "gem_central_version": "7"}
    assert report(fake).of("b") == ["7"]


def test_a_panel_without_data_is_left_out_and_so_is_a_section_without_panels(fake: FakePrometheus) -> None:
    fake.holds(r"gem_commit_queue_length\b(?!{)", {}, [1] * 121)
    shown = report(fake)
    assert shown.of("h3") == ["Queue"]
    assert shown.of("h2") == ["Settings", "Server"]


def test_a_panel_that_never_has_a_number_is_left_out(fake: FakePrometheus) -> None:
    """Nothing divided by nothing is NaN: as the mean staleness while there are no commits."""
    for bound in ("1.0", "+Inf"):
        fake.holds("gem_commit_staleness|gem_training", {"le": bound}, ["NaN"] * 121)
    assert report(fake).of("h3") == []


def test_a_rule_without_pi_has_no_section_about_it(fake: FakePrometheus) -> None:
    for bound, count in {"1.0": 1, "+Inf": 2}.items():
        fake.holds("gem_(commit_staleness|training|commits_received)_", {"le": bound}, [count] * 121)
    assert report(fake).of("h2") == ["Settings", "Training", "Staleness", "Server"]


def test_a_run_that_nothing_else_is_known_of_has_a_page(fake: FakePrometheus) -> None:
    shown = report(fake)
    assert shown.of("h2") == ["Settings"]
    assert shown.count("svg") == 0


def test_the_alerts_that_fired_are_listed_but_for_those_of_other_servers(fake: FakePrometheus) -> None:
    for name, labels in {"GemMine": {"instance": "server:9464"}, "GemOther": {"instance": "b:1"}, "GemNobodys": {}}.items():
        fake.holds("ALERTS", {"alertname": name, "alertstate": "firing", **labels}, [1] * 13, begin=BEGIN + 60)
    shown = report(fake)
    assert shown.of("li") == ["GemMine, from minute 1.0 to 2.0", "GemNobodys, from minute 1.0 to 2.0"]


SEVERAL = replace(RUN, ranges={0: "server:9464", 1: "b:1"})


def test_a_report_names_the_servers_of_all_ranges(fake: FakePrometheus) -> None:
    subtitle = report(fake, SEVERAL).of("p")[0]
    assert subtitle.endswith(", servers server:9464 (range 0), b:1 (range 1)")
    assert report(fake).of("p")[0].endswith(", server server:9464")


def test_the_alerts_of_all_ranges_are_listed_with_the_range(fake: FakePrometheus) -> None:
    for name, labels in {"GemMine": {"instance": "b:1", "range": "1"}, "GemOther": {"instance": "c:1", "range": "1"}}.items():
        fake.holds("ALERTS", {"alertname": name, "alertstate": "firing", **labels}, [1] * 13, begin=BEGIN + 60)
    fake.holds("ALERTS", {"alertname": "GemOfAnother", "alertstate": "firing", "run_id": "two"}, [1] * 13, begin=BEGIN + 60)
    assert report(fake, SEVERAL).of("li") == ["GemMine (range 1), from minute 1.0 to 2.0"]


def test_the_models_size_is_that_of_all_ranges_together(fake: FakePrometheus) -> None:
    report(fake, SEVERAL)
    (query,) = [query for query in fake.queries("query") if "gem_parameters" in query]
    assert re.fullmatch(r'sum\(last_over_time\(gem_parameters{instance="b:1"}\[600s\]\) or .*="server:9464".*\)', query)


def test_the_alerts_of_another_run_without_a_server_are_not_listed(fake: FakePrometheus) -> None:
    for name, labels in {"GemOurs": {"run": "ml/a"}, "GemOther": {"run": "ml/b"}, "GemNobodys": {}}.items():
        fake.holds("ALERTS", {"alertname": name, "alertstate": "firing", **labels}, [1] * 13, begin=BEGIN + 60)
    shown = report(fake, replace(RUN, target={"run": "ml/a"}))
    assert shown.of("li") == ["GemOurs, from minute 1.0 to 2.0", "GemNobodys, from minute 1.0 to 2.0"]


@pytest.mark.parametrize(
    "name",
    [
        HOSTILE,
        "$x$",
        "_hidden",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ["</style><img src=x onerror=alert(1)>", "<!--", "]]>", "</svg>", "&lt;", r"$\frac{1}$", "π 漢 🙂"]
        ),
    ],
)
def test_names_are_text_wherever_they_come_from(fake: FakePrometheus, name: str) -> None:
    fake.holds(r"by \((worker|tensor)\)", {"worker": name, "tensor": name}, [1] * 13)
    fake.holds("ALERTS", {"alertname": name, "instance": name}, [1] * 13)
    shown = report(fake, Run(name, name, {"own_setting": name}, BEGIN, BEGIN + 60))
    assert harmful(shown) == []
    assert shown.of("title") == [f"GEM run {name}"]
    assert shown.of("dd") == [name]
    assert f"server {name}" in "".join(shown.of("p"))
    assert shown.of("li") == [f"{name}, from minute 0.0 to 1.0"]
    assert [text.strip() for text in shown.of("text")].count(name) == shown.count("svg") == 6


LOADING = {"src", "href", "xlink:href", "srcset", "data", "poster", "action", "formaction", "background", "ping", "cite"}
ACTIVE = {"script", "iframe", "frame", "object", "embed", "base", "form", "link", "audio", "video", "img"}


def harmful(shown: Parsed) -> list[str]:
    """What in a page would have a browser load or run anything."""
    wrong = [f"<{tag}>" for tag, _ in shown.elements if tag in ACTIVE]
    for tag, attributes in shown.elements:
        for name, value in attributes.items():
            inside = value.startswith(("#", "data:image/png;base64,"))
            if name.startswith("on") or name == "http-equiv" or (name in LOADING and not inside):
                wrong.append(f"<{tag} {name}={value[:80]!r}>")
            wrong += [f"{name}: {url}" for url in re.findall(r"url\(\s*['\"]?(?!#)[^)]*", value)]
    for style in shown.of("style"):
        wrong += re.findall(r"@import|url\([^)]*|expression\(|</", style)
    return wrong


def test_a_page_needs_nothing_but_itself(full: str) -> None:
    shown = Parsed(full)
    assert shown.count("image") == 2  # the heatmaps'
    assert harmful(shown) == []


@pytest.mark.parametrize(
    "html",
    [
        "<script>1</script>",
        "<img src=x>",
        "<a href='http://a'>b</a>",
        "<image xlink:href='https://a'/>",
        "<p onclick=x>y</p>",
        "<style>@import 'a'</style>",
        "<style>p { background: url(http://a) }</style>",
        "<p style='background: url(//a)'>b</p>",
        "<link rel=stylesheet>",
    ],
)
def test_what_would_do_harm_is_found(html: str) -> None:
    """The check itself can fail."""
    assert harmful(Parsed(html))


def test_what_pictures_refer_to_is_there_once(full: str) -> None:
    """All of them share one page: a clip path of one must not be that of another."""
    shown = Parsed(full)
    values = [value for _, attributes in shown.elements for value in attributes.values()]
    wanted = {name for value in values for name in re.findall(r"url\(#([\w-]+)\)", value)}
    wanted |= {attributes["xlink:href"][1:] for tag, attributes in shown.elements if tag == "use"}
    ids = [attributes.get("id") for _, attributes in shown.elements]
    assert wanted
    assert {name: ids.count(name) for name in wanted} == dict.fromkeys(wanted, 1)


def test_a_run_of_ten_seconds_has_a_report(fake: FakePrometheus) -> None:
    fake.holds_everything(begin=NOW - 10, samples=3)
    shown = report(fake, replace(RUN, begin=NOW - 10, end=NOW))
    assert shown.count("svg") == len(DRAWN)
    assert "0:00:10" in "".join(shown.of("p"))
    assert "A point every 5 s, rates over 20 s." in "".join(shown.of("p"))


def test_a_run_that_was_seen_once_has_a_report(fake: FakePrometheus) -> None:
    fake.holds_everything(begin=NOW, samples=1, without="by")
    shown = report(fake, replace(RUN, begin=NOW, end=NOW))
    assert shown.of("h1") == ["Run one"]
    assert shown.count("svg") > 0


def test_a_hundred_workers_are_drawn_but_not_named(fake: FakePrometheus) -> None:
    for number in range(100):
        fake.holds("gem_worker_", {"worker": f"worker-{number}"}, [number] * 121)
    text = page(fake.client, RUN, NOW)
    shown = Parsed(text)
    assert [one.strip() for one in shown.of("text")].count("100 series") >= 4
    assert "worker-7" not in text
    assert len(text) < 5e6
