"""Writes Grafana's dashboards, which the Helm chart and compose share, and the chart's alerts: generate.py [--check]

The dashboards are made from `gem_dashboards.boards`, and the chart's alerts from deploy/prometheus/alerts.yml. The dashboards
are built with Grafana's typed Foundation SDK, so that a wrong option fails here and not in a browser. With --check nothing is
written; exit status 1 if the committed files are not what would be written.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from gem_dashboards.boards import ALERTS, DASHBOARDS, EVENTS
from gem_dashboards.panels import Dashboard, Event, Kind, Limits, Panel
from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync as CursorSync
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

_ROOT = Path(__file__).parents[2]
# Helm reads no file outside of the chart; compose mounts the chart's dashboards.
CHART = _ROOT / "deploy" / "helm" / "gem" / "files"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
ALERT_RULES = _ROOT / "deploy" / "prometheus" / "alerts.yml"
_WIDTH, _HALF, _SIXTH = 24, 12, 4  # columns of a page


def build(page: Dashboard) -> dashboard.Dashboard:
    """One dashboard, with a choice of data source and of servers, and links to the others."""
    board = (
        _page(page.uid, page.title, page.description)
        .time("now-15m", "now")
        .refresh("5s")
        .timezone("browser")
        .tooltip(CursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("server")
            .label("Server")
            .datasource(SOURCE)
            .query('label_values(gem_central_version{range=~"0|"}, instance)')
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    )
    for event in EVENTS:
        board = board.annotation(_marks(event))
    first = [_number(ALERTS), _alert_list()] if page.alerts else []
    for number, panel in enumerate([*first, *(_DRAW[panel.kind](panel) for panel in page.panels)], 1):
        board = board.with_panel(panel.id(number))
    return board


def _page(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """What all dashboards have: a name, and links to the others."""
    others = dashboard.DashboardLink("GEM dashboards").type(DashboardLinkType.DASHBOARDS).tags(["gem"])
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["gem"])
        .link(others.keep_time(True).include_vars(True))
    )


def _marks(event: Event) -> dashboard.AnnotationQuery:
    query = dashboard.AnnotationQuery().name(event.name).datasource(SOURCE).expr(event.expr)
    return query.icon_color(event.colour).enable(event.shown)


def _alert_list() -> dashboard.Panel:
    """Prometheus's alerts that wait or fire. The SDK has no builder for this kind of panel: its options are Grafana's own."""
    options = {
        "viewMode": "list", "groupMode": "default", "sortOrder": 3, "alertName": "Gem", "maxItems": 20, "showInstances": True,
        "stateFilter": {"firing": True, "pending": True, "error": True, "noData": False, "normal": False},
    }  # fmt: skip
    panel = dashboard.Panel().type("alertlist").title("Alerts").options(options)
    panel = panel.description("Alerts of every run that fire, or soon will; docs/troubleshooting.md explains each. Good: none.")
    return panel.span(_WIDTH - _SIXTH).height(4)


def _colours(limits: Limits) -> dashboard.ThresholdsConfig:
    """Grafana colours a value by the last step that it reaches."""
    steps = [Threshold(None, "green"), Threshold(limits.orange, "orange"), Threshold(limits.red, "red")]
    if limits.falling:
        steps = [Threshold(None, "red"), Threshold(limits.red, "orange"), Threshold(limits.orange, "green")]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(panel: Panel) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .unit(panel.unit)
        .fill_opacity(5)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.log:
        drawn = drawn.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    else:
        drawn = drawn.axis_soft_min(0)
    if panel.most is not None:
        drawn = drawn.max(panel.most)
    if panel.limits is not None:
        dashed = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        drawn = drawn.thresholds(_colours(panel.limits)).thresholds_style(dashed)
    dashes = DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 8]})
    for query in panel.queries:
        if query.dashed:
            drawn = drawn.override_by_name(query.legend, [dashes])
    return _finished(drawn, panel, width=_HALF, height=8)


def _heatmap(panel: Panel) -> heatmap.Panel:
    drawn = (
        heatmap.Panel()
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .show_legend()
    )
    return _finished(drawn, panel, width=_HALF, height=8)


def _number(panel: Panel) -> stat.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    drawn = stat.Panel().unit(panel.unit).reduce_options(newest).graph_mode(BigValueGraphMode.AREA)
    if panel.limits is None:  # no colour: Grafana's own thresholds would paint every number above 80 red
        drawn = drawn.color_mode(BigValueColorMode.NONE)
    else:
        drawn = drawn.color_mode(BigValueColorMode.BACKGROUND).thresholds(_colours(panel.limits))
    return _finished(drawn, panel, width=_SIXTH, height=4)


def _finished(drawn, panel: Panel, width: int, height: int):  # type: ignore[no-untyped-def]
    """What all kinds have in common."""
    drawn = drawn.title(panel.title).description(panel.description).datasource(SOURCE).span(width).height(height)
    form = PromQueryFormat.HEATMAP if panel.kind is Kind.HEATMAP else PromQueryFormat.TIME_SERIES
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).range().format(form).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        drawn = drawn.with_target(target.legend_format(query.legend or "__auto"))
    return drawn


_DRAW = {Kind.LINES: _lines, Kind.HEATMAP: _heatmap, Kind.NUMBER: _number}


# -- the chart's alerts

# What a selector is not: strings, ranges, labels that are grouped or matched by, functions, operators, numbers. Then a metric
# and its matchers.
_SELECTOR = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[[^]]*\]|\b(?:\w+\s+(?:by|without)|by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)'
    r"|[\w:]+\s*\(|\b(?:and|or|unless|bool|offset|Inf|NaN)\b|\b\d[\w.]*"
    r"|(?P<metric>[a-zA-Z_:][\w:]*)(?:\{(?P<matchers>[^}]*)\})?"
)


def limited(expression: str, matcher: str) -> str:
    """A PromQL expression with one more matcher in each selector. Each selector must begin with a metric's name."""

    def add(found: re.Match[str]) -> str:
        if found["metric"] is None:
            return found[0]
        matchers = [matcher, *filter(None, [found["matchers"]])]
        return f"{found['metric']}{{{', '.join(matchers)}}}"

    return _SELECTOR.sub(add, expression)


def chart_rules() -> str:
    """The alerts for one run alone. The chart fills in its run and its namespace.

    The label `namespace` is for AlertmanagerConfig, which by default gets the alerts of its own namespace alone.
    """
    groups = yaml.safe_load(ALERT_RULES.read_text(encoding="utf-8"))["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        rule["expr"] = limited(rule["expr"], 'run="@RUN@"')
        if "alert" in rule:
            rule["labels"]["namespace"] = "@NAMESPACE@"
    head = "# Written by deploy/grafana/generate.py from deploy/prometheus/alerts.yml, which says why each rule is as it is.\n"
    return head + yaml.dump({"groups": groups}, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=1 << 20)


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines stay as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


# -- the files


def files() -> dict[Path, str]:
    """What is to be written where."""
    boards = [built.build() for built in map(build, DASHBOARDS)]
    texts = {
        CHART / "dashboards" / f"{board.uid.removeprefix('gem-')}.json": json.dumps(
            board, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False
        )
        + "\n"
        for board in boards
    }
    return {**texts, CHART / "alerts.yml": chart_rules()}


def _there() -> list[Path]:
    return [path for path in CHART.rglob("*") if path.is_file()]


def main(arguments: list[str]) -> int:
    wanted = files()
    if arguments == ["--check"]:
        if {path: path.read_text(encoding="utf-8") for path in _there()} != wanted:
            print("the dashboards or the chart's alerts are not what their sources say: run `make dashboards`", file=sys.stderr)
            return 1
        return 0
    for path in set(_there()) - wanted.keys():
        path.unlink()
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path.parent.name}/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
