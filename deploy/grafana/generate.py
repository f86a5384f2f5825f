"""Writes Grafana's dashboards from `gem_client.panels`: python deploy/grafana/generate.py [--check]

Built with Grafana's typed Foundation SDK, so that a wrong option fails here and not in a browser. With --check nothing is
written; exit status 1 if the committed files are not what would be written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gem_client.panels import DASHBOARDS, Dashboard, Kind, Panel
from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync as CursorSync
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, DynamicConfigValue, VariableRefresh
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
_HALF, _SIXTH = 12, 4  # of a page's 24 columns


def build(page: Dashboard) -> dashboard.Dashboard:
    """One dashboard, with a choice of data source and of servers, and links to the others."""
    board = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags(["gem"])
        .time("now-15m", "now")
        .refresh("5s")
        .timezone("browser")
        .tooltip(CursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("server")
            .label("Server")
            .datasource(SOURCE)
            .query("label_values(gem_central_version, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
        .link(
            dashboard.DashboardLink("GEM dashboards")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["gem"])
            .keep_time(True)
            .include_vars(True)
        )
    )
    for number, panel in enumerate(page.panels, 1):
        board = board.with_panel(_DRAW[panel.kind](panel).id(number))
    return board


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
    # No colour: Grafana's own thresholds would paint every number above 80 red.
    drawn = stat.Panel().unit(panel.unit).reduce_options(newest).color_mode(BigValueColorMode.NONE)
    drawn = drawn.graph_mode(BigValueGraphMode.AREA)
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


def files() -> dict[Path, str]:
    """What is to be written where."""
    return {
        FOLDER / f"{page.uid.removeprefix('gem-')}.json": json.dumps(
            build(page).build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False
        )
        + "\n"
        for page in DASHBOARDS
    }


def main(arguments: list[str]) -> int:
    wanted = files()
    if arguments == ["--check"]:
        there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
        if there != wanted:
            print("the dashboards are not what gem_client.panels says: run `make dashboards`", file=sys.stderr)
            return 1
        return 0
    FOLDER.mkdir(exist_ok=True)
    for path in set(FOLDER.glob("*.json")) - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
