"""The report of a run, made from the answers of a Prometheus that says whatever a test wants it to say."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gem_client.ctl.cli import main
from gem_client.ctl.dashboards import DASHBOARDS
from gem_client.ctl.panels import Kind, Panel, Query
from gem_client.ctl.plots import draw
from gem_client.ctl.prometheus import Prometheus, PrometheusError, Series
from gem_client.ctl.report import Run, fill_in, find_run, page

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")

NOW = 1_700_000_000.0
BEGIN = NOW - 3600
SETTINGS = {"rule": "gem", "learning_rate": "0.05", "momentum": "0.9"}
READABLE = {"rule": "gem", "learning rate": "0.05", "momentum": "0.9"}
HOSTILE = """<script>alert("1")</script> 'it''s' & a\\b\\ [x].*+?|(y) {z} $"""
RUN = Run("one", "server:9464", SETTINGS, BEGIN, BEGIN + 600)
DRAWN = [panel for board in DASHBOARDS for panel in board.panels if panel.kind is not Kind.NUMBER]
Answer = tuple[int, bytes]
Labels = dict[str, str]


class FakePrometheus:
    """A Prometheus over HTTP that holds what it is given, whatever the query does with it.

    Attributes:
        url: Where it is.
        asked: Every question: what of the API, and its arguments.
        numbers: Answers to `query`: the first whose key is part of the query.
        vectors: Likewise, for answers of several series: labels and value of each.
        targets: Answer to `targets`.
        respond: Answers in place of everything else, where it is set; None hangs up.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.numbers: dict[str, str] = {}
        self.vectors: dict[str, list[tuple[Labels, str]]] = {}
        self.targets: Any = [{"labels": {"job": "gem-server", "instance": "server:9464"}, "scrapeInterval": "5s"}]
        self.respond: Callable[[], Answer | None] | None = None
        self._series: list[tuple[str, Labels, list[tuple[float, str]]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlparse(self.path)
                answer = fake._answer(url.path, dict(urllib.parse.parse_qsl(url.query)))
                if answer is not None:
                    self.send_response(answer[0])
                    self.end_headers()
                    self.wfile.write(answer[1])

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def client(self) -> Prometheus:
        return Prometheus(self.url)

    def holds(self, pattern: str, labels: Labels, values: Any, begin: float = BEGIN, step: float = 5.0) -> None:
        """A series that answers every range query in which the pattern is found, whatever its step."""
        self._series.append((pattern, labels, [(begin + step * number, str(value)) for number, value in enumerate(values)]))

    def holds_everything(self, begin: float = BEGIN, samples: int = 121, without: str = "$^") -> None:
        """Two buckets for every panel's query in which `without` is not found."""
        for bound, count in {"1.0": 2, "+Inf": 3}.items():
            values = [count * (1 + number % 7) for number in range(samples)]
            self.holds(rf'^(?!gem_run_info|ALERTS|gem_central_version{{instance="|.*({without}))', {"le": bound}, values, begin)

    def has_run(
        self, run_id: str, instance: str = "server:9464", begin: float = BEGIN, seconds: int = 600, **more: str
    ) -> None:
        """A run that was seen from `begin` on, by its settings."""
        labels = {"__name__": "gem_run_info", "job": "gem-server", "instance": instance, "run_id": run_id, **SETTINGS, **more}
        self.holds("gem_run_info", labels, ["1"] * (seconds // 5 + 1), begin)

    def queries(self, what: str = "query_range") -> list[str]:
        return [arguments["query"] for kind, arguments in self.asked if kind == what]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, arguments: dict[str, str]) -> Answer | None:
        what = path.rpartition("/api/v1/")[2]
        self.asked.append((what, arguments))
        if self.respond is not None:
            return self.respond()
        data = {"targets": self._targets, "query": self._value, "query_range": self._range}[what](arguments)
        return 200, json.dumps({"status": "success", "data": data}).encode()

    def _targets(self, arguments: dict[str, str]) -> Any:
        return {"activeTargets": self.targets}

    def _value(self, arguments: dict[str, str]) -> Any:
        found: list[Any] = [[({}, number)] for part, number in self.numbers.items() if part in arguments["query"]]
        found += [vector for part, vector in self.vectors.items() if part in arguments["query"]]
        rows = [{"metric": labels, "value": [float(arguments["time"]), value]} for labels, value in (found or [[]])[0]]
        return {"resultType": "vector", "result": rows}

    def _range(self, arguments: dict[str, str]) -> Any:
        begin, end = float(arguments["start"]), float(arguments["end"])
        result = []
        for pattern, labels, samples in self._series:
            within = [sample for sample in samples if begin <= sample[0] <= end]
            if within and re.search(pattern, arguments["query"]):
                result.append({"metric": labels, "values": within})
        return {"resultType": "matrix", "result": result}


@pytest.fixture
def fake() -> Iterator[FakePrometheus]:
    prometheus = FakePrometheus()
    yield prometheus
    prometheus.close()


def found(fake: FakePrometheus, run_id: str | None = None, last: float = 86400.0) -> Run:
    return find_run(fake.client, run_id, last, NOW)


def about(at: float) -> Any:
    """A time on which a run may begin or end as well: no look at a whole day is sharper than this."""
    return pytest.approx(at, rel=0, abs=10)


# -- which run


def test_the_newest_of_several_runs_is_chosen(fake: FakePrometheus) -> None:
    for number, run_id in enumerate(["first", "last", "middle"]):
        fake.has_run(run_id, begin=BEGIN + 600 * (0, 2, 1)[number], seconds=500)
    assert found(fake).run_id == "last"


def test_of_two_runs_that_go_on_the_one_that_began_last_is_chosen(fake: FakePrometheus) -> None:
    fake.has_run("older", "a:1", NOW - 600, 600)
    fake.has_run("newer", "b:1", NOW - 300, 300)
    assert (found(fake).run_id, found(fake).instance) == ("newer", "b:1")


def test_a_run_can_be_asked_for(fake: FakePrometheus) -> None:
    fake.has_run("old", seconds=500)
    fake.has_run("new", begin=BEGIN + 600)
    run = found(fake, "old")
    assert (run.run_id, run.begin, run.end) == ("old", about(BEGIN), about(BEGIN + 500))


def test_a_run_that_is_unknown_is_refused_with_those_that_are_known(fake: FakePrometheus) -> None:
    fake.has_run("b")
    fake.has_run("a")
    with pytest.raises(PrometheusError, match=r"no run 'c', only a, b"):
        found(fake, "c")


def test_where_no_server_was_seen_it_is_said_where_to_look(fake: FakePrometheus) -> None:
    with pytest.raises(PrometheusError, match=r"last 24:00:00\. Does it scrape gem-server\? Use --last"):
        found(fake)


def test_what_a_run_is_called_and_where_it_ran_are_no_settings(fake: FakePrometheus) -> None:
    fake.has_run("one", "host:1")
    run = found(fake)
    assert (run.run_id, run.instance, run.settings) == ("one", "host:1", SETTINGS)


def test_a_resumed_run_is_one_run_with_the_settings_that_it_has_now(fake: FakePrometheus) -> None:
    fake.has_run("one", learning_rate="0.1", seconds=300)
    fake.has_run("one", learning_rate="0.01", begin=BEGIN + 400, seconds=300)
    run = found(fake)
    assert (run.settings["learning_rate"], run.begin, run.end) == ("0.01", about(BEGIN), about(BEGIN + 700))


def test_a_server_that_idles_after_its_run_is_not_looked_at(fake: FakePrometheus) -> None:
    fake.has_run("one", seconds=3000)
    fake.holds("gem_central_version", {"instance": "server:9464"}, [*range(100), *[99] * 400])
    assert found(fake).end == about(BEGIN + 99 * 5 + 30)


def test_a_run_that_goes_on_ends_where_it_was_last_seen(fake: FakePrometheus) -> None:
    fake.has_run("one", seconds=600)
    fake.holds("gem_central_version", {"instance": "server:9464"}, range(121))
    assert found(fake).end == about(BEGIN + 600)


def test_a_run_without_commits_is_shown_whole(fake: FakePrometheus) -> None:
    fake.has_run("one", seconds=600)
    fake.holds("gem_central_version", {"instance": "server:9464"}, [0] * 121)
    assert found(fake).end == about(BEGIN + 600)


def test_only_the_runs_own_server_is_asked_for_its_last_commit(fake: FakePrometheus) -> None:
    fake.has_run("here", "a:1")
    fake.has_run("there", "b:1")
    fake.holds('gem_central_version{instance="a:1"}', {}, [*range(10), *[9] * 111])
    fake.holds('gem_central_version{instance="b:1"}', {}, range(121))
    assert found(fake, "here").end == about(BEGIN + 45 + 30)
    assert found(fake, "there").end == about(BEGIN + 600)


def test_the_same_run_id_on_two_servers_is_two_runs(fake: FakePrometheus) -> None:
    """As where a checkpoint was copied to another machine."""
    fake.has_run("one", "a:1", seconds=300)
    fake.has_run("one", "b:1", begin=BEGIN + 400, seconds=300)
    assert (found(fake).instance, found(fake).begin) == ("b:1", about(BEGIN + 400))


@pytest.mark.parametrize("last", [36.0, 3600.0, 86400.0, 30 * 86400.0, 3650 * 86400.0])
def test_however_far_one_looks_back_prometheus_gives_that_many_points(fake: FakePrometheus, last: float) -> None:
    fake.has_run("one", begin=NOW - 30, seconds=30)
    assert found(fake, last=last).run_id == "one"
    for _, arguments in fake.asked:
        points = (float(arguments["end"]) - float(arguments["start"])) / float(arguments["step"])
        assert points <= 10_999
        assert float(arguments["step"]) >= 1


# -- queries


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


# -- the page


class Parsed(HTMLParser):
    """A page's elements, and the text in each kind of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> ends nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def of(self, tag: str) -> list[str]:
        """The texts directly within elements of a kind."""
        return [text for within, text in self.texts if within == tag]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def report(fake: FakePrometheus, run: Run = RUN) -> Parsed:
    return Parsed(page(fake.client, run, NOW))


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


def test_every_query_of_every_panel_is_asked_once_for_the_time_of_the_run(fake: FakePrometheus) -> None:
    report(fake)
    wanted = [fill_in(query.expr, "server:9464", 20) for panel in DRAWN for query in panel.queries]
    asked = [arguments for what, arguments in fake.asked if what == "query_range" and "ALERTS" not in arguments["query"]]
    assert [arguments["query"] for arguments in asked] == wanted
    assert {(float(arguments["start"]), float(arguments["end"])) for arguments in asked} == {(BEGIN, BEGIN + 600)}


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
    fake.holds("gem_commit_queue_length", {}, [1] * 121)
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
        fake.holds("gem_(commit_staleness|training|sent)_", {"le": bound}, [count] * 121)
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


def test_a_long_run_is_drawn_with_few_points(fake: FakePrometheus) -> None:
    report(fake, replace(RUN, begin=NOW - 200_000, end=NOW))
    (step,) = {arguments["step"] for kind, arguments in fake.asked if kind == "query_range"}
    assert float(step) == 500
    assert "[500s]" in "".join(fake.queries())


def test_a_hundred_workers_are_drawn_but_not_named(fake: FakePrometheus) -> None:
    for number in range(100):
        fake.holds("gem_worker_", {"worker": f"worker-{number}"}, [number] * 121)
    text = page(fake.client, RUN, NOW)
    shown = Parsed(text)
    assert [one.strip() for one in shown.of("text")].count("100 series") >= 4
    assert "worker-7" not in text
    assert len(text) < 5e6


# -- the pictures


def series(values: Any, begin: float = BEGIN, **labels: str) -> Series:
    return Series(labels, begin + 5.0 * np.arange(len(values), dtype=np.float64), np.array(values, np.float64))


def lines(*several: Series, legend: str = "", end: float = BEGIN + 60, **panel: Any) -> list[str]:
    """The texts of a picture with lines."""
    return texts(draw(Panel("a title", "", (Query("x"),), **panel), [(Query("x", legend), list(several))], BEGIN, end))


def heatmap(buckets: dict[str, list[float]], end: float = BEGIN + 60) -> str:
    panel = Panel("a heatmap", "", (Query("x"),), kind=Kind.HEATMAP)
    return draw(panel, [(Query("x", "{{le}}"), [series(values, le=bound) for bound, values in buckets.items()])], BEGIN, end)


def texts(svg: str) -> list[str]:
    """The texts of a picture, which must be well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_is_the_same_every_time() -> None:
    assert heatmap({"0.0": [1, 2], "+Inf": [3, 9]}) == heatmap({"0.0": [1, 2], "+Inf": [3, 9]})


def test_without_any_series_there_is_no_picture() -> None:
    assert draw(Panel("a title", "", (Query("x"),)), [(Query("x"), []), (Query("x"), [])], BEGIN, BEGIN + 60) == ""


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[1.0], [0, 0, 0], [1, float("nan"), 3], [1, float("inf"), 3], [float("-inf"), 2], [-1, 2], [-3, -2], [1e30, 1e-30]],
    ids=str,
)
def test_lines_can_be_drawn_of_any_values(values: list[float], log: bool) -> None:
    assert lines(series(values), legend="x", log=log)


@pytest.mark.parametrize("unit", sorted({panel.unit for panel in DRAWN}))
def test_every_unit_can_be_shown(unit: str) -> None:
    assert lines(series([0, 1e-6, 0.5, 12, 1e9]), unit=unit)


@pytest.mark.parametrize("values", [[1, 3], [0.002, 0.9], [1, 1e9], [5, 5]], ids=str)
def test_ticks_on_a_logarithmic_axis_are_numbers(values: list[float]) -> None:
    for unit in ("short", "bytes", "s"):
        assert not [text for text in lines(series(values), log=True, unit=unit) if "$" in text or "\\" in text]


def test_lines_below_zero_are_shown() -> None:
    """A loss may be negative: a likelihood's, for one."""
    assert any(re.match(r"[-−]\d", text) for text in lines(series([-1, -2, -3])))
    assert any(re.match(r"[-−]\d", text) for text in lines(series([1, -2, 3])))


def test_no_line_is_drawn_where_nothing_was_scraped() -> None:
    """A straight line across a gap would claim what nobody saw."""
    whole, gap = [BEGIN, BEGIN + 5, BEGIN + 10, BEGIN + 15], [BEGIN, BEGIN + 5, BEGIN + 30, BEGIN + 35]
    pictures = [
        draw(
            Panel("a title", "", (Query("x"),)),
            [(Query("x"), [Series({}, np.array(times), np.arange(4.0))])],
            BEGIN,
            BEGIN + 60,
        )
        for times in (whole, gap)
    ]
    strokes = [max(path.get("d", "").count("M") for path in curves(picture)) for picture in pictures]
    assert strokes == [1, 2]


def curves(svg: str) -> list[ElementTree.Element]:
    """The paths that show data: they are the clipped ones of the lines' colour."""
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    return [path for path in paths if "#1f4e79" in path.get("style", "")]


def test_each_line_is_called_by_its_labels() -> None:
    shown = lines(series([1, 2], worker="ann"), series([1, 2], worker="bob"), series([1, 2]), legend="worker {{ worker }}")
    assert [text.strip() for text in shown if text.startswith("worker")] == ["worker ann", "worker bob", "worker"]


def test_the_time_axis_counts_from_the_beginning_in_a_fitting_unit() -> None:
    units = {60: "seconds", 600: "minutes", 7 * 3600: "hours"}
    for span, unit in units.items():
        shown = lines(series([1, 2]), end=BEGIN + span)
        assert unit in shown
        assert "0" in shown


BUCKETS = {
    "one sample": {"0.0": [4.0], "1.0": [6.0], "+Inf": [6.0]},
    "all zero": {"0.0": [0.0, 0.0], "+Inf": [0.0, 0.0]},
    "one sample, zero": {"0.0": [0.0], "+Inf": [0.0]},
    "no number": {"0.0": [float("nan")] * 3, "+Inf": [float("nan")] * 3},
    "no number at times": {"0.0": [1, float("nan"), 3], "1.0": [2, float("nan"), 9], "+Inf": [2, float("nan"), 9]},
    "one bucket": {"+Inf": [1.0, 2.0]},
    "less than before": {"0.0": [5.0, 5.0], "1.0": [4.0, 6.0], "+Inf": [6.0, 6.0]},
    "infinite": {"0.0": [1.0, 2.0], "+Inf": [float("inf"), 3.0]},
    "huge": {"0.0": [1e-300, 1.0], "+Inf": [1e300, 1e300]},
    "ragged": {"0.0": [1.0, 2.0, 3.0], "+Inf": [2.0]},
}


@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)
def test_a_heatmap_can_be_drawn_of_any_histogram(buckets: dict[str, list[float]]) -> None:
    svg = heatmap(buckets)
    assert svg == "" or ElementTree.fromstring(svg) is not None


@pytest.mark.parametrize("what", ["one sample", "no number at times", "one bucket", "less than before"])
def test_what_a_heatmap_holds_is_shown(what: str) -> None:
    assert "data:image/png" in heatmap(BUCKETS[what])


def test_a_heatmap_is_as_high_as_the_buckets_that_hold_anything() -> None:
    """Bounds are in the order of numbers, not of texts."""
    buckets = {"10.0": [7.0, 7.0], "2.0": [5.0, 5.0], "0.5": [0.0, 0.0], "+Inf": [7.0, 7.0], "100.0": [7.0, 7.0]}
    assert [text for text in texts(heatmap(buckets)) if text.startswith("≤")] == ["≤ 2", "≤ 10"]


# -- Prometheus


@pytest.mark.parametrize("url", ["", "127.0.0.1:9090", "ftp://127.0.0.1", "file:///etc/passwd"])
def test_an_address_without_http_is_refused(url: str) -> None:
    with pytest.raises(PrometheusError, match="write http://HOST:9090"):
        Prometheus(url)


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://a b", "http://[::1"])
def test_an_address_that_makes_no_sense_is_an_error_of_its_own_kind(url: str) -> None:
    with pytest.raises(PrometheusError):
        Prometheus(url).value("x", NOW)


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PrometheusError, match=re.escape(url)):
            Prometheus(url).range("x", 0, 1, 1)


def test_who_does_not_answer_in_time_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PrometheusError, match="timed out"):
        Prometheus(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05).value("x", NOW)


def test_a_prometheus_may_live_below_a_path(fake: FakePrometheus) -> None:
    fake.numbers = {"x": "1"}
    assert Prometheus(f"{fake.url}/prometheus/").value("x", NOW) == 1


def test_series_come_with_their_labels_and_all_kinds_of_numbers(fake: FakePrometheus) -> None:
    fake.holds("x", {"a": "b"}, ["1", "-2.5e-3", "NaN", "+Inf", "-Inf"])
    (one,) = fake.client.range("x", BEGIN, NOW, 5)
    assert one.labels == {"a": "b"}
    np.testing.assert_array_equal(one.times, BEGIN + 5.0 * np.arange(5))
    np.testing.assert_array_equal(one.values, [1, -2.5e-3, np.nan, np.inf, -np.inf])


def test_no_series_is_an_empty_list_and_no_value_is_none(fake: FakePrometheus) -> None:
    assert fake.client.range("x", BEGIN, NOW, 5) == []
    assert fake.client.value("x", NOW) is None


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("1e9", 1e9), ("+Inf", np.inf), ("-Inf", -np.inf)])
def test_a_value_is_a_number(fake: FakePrometheus, text: str, value: float) -> None:
    fake.numbers = {"x": text}
    assert fake.client.value("x", NOW) == value


def test_a_question_is_passed_on_to_the_letter(fake: FakePrometheus) -> None:
    query = 'x{a="&=+ %20#π"}'
    fake.client.range(query, 1.25, 2.5, 0.5)
    assert fake.asked == [("query_range", {"query": query, "start": "1.250", "end": "2.500", "step": "0.500"})]


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


def refusal(status: int, **body: Any) -> Callable[[], Answer]:
    return lambda: (status, json.dumps({"status": "error", **body}).encode())


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (refusal(400, errorType="bad_data", error="parse error: unexpected }"), "parse error: unexpected }"),
        (refusal(422, errorType="execution", error="too many samples"), "too many samples"),
        (refusal(503, errorType="timeout", error="query timed out"), "query timed out"),
        (refusal(503), "503"),
        (lambda: (503, b"Service Unavailable"), "503"),
        (lambda: (404, b"<html>not found</html>"), "404"),
        (lambda: (500, b"[]"), "500"),
        (lambda: (401, b""), "401"),
    ],
)
def test_a_refusal_is_an_error_that_says_why(fake: FakePrometheus, respond: Callable[[], Answer], words: str) -> None:
    fake.respond = respond
    for ask in questions(fake.client):
        with pytest.raises(PrometheusError, match=re.escape(words)):
            ask()


def questions(client: Prometheus) -> list[Callable[[], object]]:
    return [lambda: client.range("x", BEGIN, NOW, 5), lambda: client.value("x", NOW), lambda: page(client, RUN, NOW)]


GARBAGE = {
    "nothing": b"",
    "HTML": b"<html>log in first</html>",
    "no UTF-8": b'{"data": "\xff"}',
    "half of it": b'{"status": "success", "data": {"resul',
    "a list": b"[]",
    "a number": b"7",
    "no data": b'{"status": "success"}',
    "data that is null": b'{"status": "success", "data": null}',
    "data that is a list": b'{"status": "success", "data": []}',
    "data without a result": b'{"status": "success", "data": {}}',
    "a result that is a number": b'{"data": {"result": 7, "activeTargets": 7}}',
    "a result of another kind": b'{"data": {"result": [7], "activeTargets": [7]}}',
    "no values": b'{"data": {"result": [{"metric": {}}], "activeTargets": [{"scrapeInterval": 7}]}}',
    "no numbers": b'{"data": {"result": [{"metric": {}, "values": [[1, "x"]], "value": [1, "x"]}], "activeTargets": 7}}',
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_none_of_a_prometheus_is_an_error(fake: FakePrometheus, body: bytes) -> None:
    fake.respond = lambda: (200, body)
    for ask in questions(fake.client):
        with pytest.raises(PrometheusError, match=re.escape(fake.url)):
            ask()


RUDE = {
    "hangs up": b"",
    "hangs up in the headers": b"HTTP/1.1 200 OK\r\nContent-Le",
    "hangs up in the answer": b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"status": "success", "data"',
    "hangs up in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n{",
    "hangs up in a refusal": b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n{",
    "speaks no HTTP": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n\r\n",
    "never ends a line": b"HTTP/1.1 200 " + b"x" * 70_000,
    "redirects to itself": b"HTTP/1.1 302 Found\r\nLocation: /api/v1/query\r\nContent-Length: 0\r\n\r\n",
}


@pytest.fixture(params=list(RUDE.values()), ids=list(RUDE))
def rude(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that reads a request, answers with these bytes and hangs up."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(request.param)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_a_connection_that_breaks_is_an_error(rude: str) -> None:
    with pytest.raises(PrometheusError):
        Prometheus(rude, timeout=5).value("x", NOW)


# -- gem-ctl report


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments], env={"GEM_PROMETHEUS": None, "GEM_REPORT_RUN": None})


@pytest.fixture
def fresh(fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch) -> FakePrometheus:
    """A Prometheus that knows two runs of the last hour."""
    monkeypatch.setattr("gem_client.ctl.cli.time.time", lambda: NOW)
    fake.has_run("older", seconds=500)
    fake.has_run("newer", begin=BEGIN + 600)
    return fake


def test_the_report_is_named_after_its_run(fresh: FakePrometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = ctl("--prometheus", fresh.url)
    assert (result.exit_code, result.stdout) == (0, "wrote gem-newer.html: run newer, 0:10:00\n")
    assert "Run newer" in (tmp_path / "gem-newer.html").read_text(encoding="utf-8")


def test_the_report_goes_where_it_is_told(fresh: FakePrometheus, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = ctl(str(out), "--prometheus", fresh.url, "--run", "older")
    assert (result.exit_code, result.stdout) == (0, f"wrote {out}: run older, 0:08:20\n")
    assert "Run older" in out.read_text(encoding="utf-8")


def test_a_report_that_can_not_be_made_is_one_line_and_leaves_no_file(fresh: FakePrometheus, tmp_path: Path) -> None:
    for arguments, words in {
        ("--prometheus", "nonsense"): "write http://HOST:9090",
        ("--prometheus", "http://127.0.0.1:1"): "is its address right (--prometheus)?",
        ("--prometheus", fresh.url, "--run", "strange"): "only newer, older",
        ("--prometheus", fresh.url, "--last", "0.1"): "Does it scrape gem-server?",
    }.items():
        result = ctl(str(tmp_path / "out.html"), *arguments)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert words in line
        assert list(tmp_path.iterdir()) == []


def test_a_report_that_breaks_off_leaves_the_one_before_it(fresh: FakePrometheus, tmp_path: Path) -> None:
    fresh.targets = None
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("old")
    assert (ctl(str(old), "--prometheus", fresh.url).exit_code, old.read_text()) == (1, "old")
    assert ctl(str(new), "--prometheus", fresh.url).exit_code == 1
    assert not new.exists()


def test_the_report_may_go_to_standard_output(fresh: FakePrometheus) -> None:
    result = ctl("-", "--prometheus", fresh.url)
    assert result.exit_code == 0
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.endswith("</html>\n")
    assert result.stderr == "wrote -: run newer, 0:10:00\n"


def test_a_report_that_can_not_be_written_is_one_line(fresh: FakePrometheus, tmp_path: Path) -> None:
    result = ctl(str(tmp_path / "nowhere" / "out.html"), "--prometheus", fresh.url)
    assert result.exit_code == 1
    assert "can't write the report" in result.stderr


def test_a_run_with_an_odd_name_gets_a_file_in_this_folder(
    fake: FakePrometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can be scraped can call a run what he likes."""
    monkeypatch.setattr("gem_client.ctl.cli.time.time", lambda: NOW)
    monkeypatch.chdir(tmp_path)
    fake.has_run("/../out/of/here")
    result = ctl("--prometheus", fake.url)
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("gem-*.html"))) == 1
