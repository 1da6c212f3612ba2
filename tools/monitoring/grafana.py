"""Conversion of a page to Grafana's JSON with Grafana's own library.

It uses the first version of the schema, which all supported Grafana versions read from a file.
"""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Final

from tools.monitoring.vocabulary import Look, Page, Panel, Query

with warnings.catch_warnings():
    # The library prefers the second version, which only the newest Grafana reads from a file.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        bargauge,
        common,
        dashboard,
        heatmap,
        prometheus,
        stat,
        statetimeline,
        timeseries,
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.common import (
        BigValueColorMode,
        BigValueGraphMode,
        DataSourceRef,
        LegendDisplayMode,
        LegendPlacement,
        SortOrder,
        StackingMode,
        TooltipDisplayMode,
        VisibilityMode,
    )
    from grafana_foundation_sdk.models.dashboard import (
        DashboardCursorSync,
        DashboardLinkType,
        FieldColorModeId,
        Threshold,
        ThresholdsMode,
        VariableHide,
        VariableOption,
        VariableRefresh,
        VariableSort,
    )
    from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# Address of the runbooks on a laptop, where Grafana serves them (deploy/observability). The chart
# replaces it with the address in its values, or removes the links if the values have none.
RUNBOOKS_URL: Final = "/public/runbooks"
TAG: Final = "tidemill"
REFRESH: Final = "30s"  # two scrapes at the usual period
ALL: Final = ".*"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Width and height of panels on a grid of 24 columns.
_NUMBER_SIZE: Final = (4, 4)
_SIZE: Final = (8, 8)
# Label and query of each variable. The metric of the query exists from the start of a process.
_EVERYWHERE = 'cluster=~"$cluster",namespace=~"$namespace"'
_VARIABLES = {
    "cluster": ("Cluster", "label_values(rocketmq_build_info, cluster)"),
    "namespace": ("Namespace", 'label_values(rocketmq_build_info{cluster=~"$cluster"}, namespace)'),
    "node": ("Node", f"label_values(rocketmq_build_info{{{_EVERYWHERE}}}, node_id)"),
    "topic": ("Topic", f"label_values(rocketmq_messages_in_total{{{_EVERYWHERE}}}, topic)"),
    "consumer_group": (
        "Consumer group",
        f"label_values(rocketmq_consumer_lag_messages{{{_EVERYWHERE}}}, consumer_group)",
    ),
}

_Panel = timeseries.Panel | heatmap.Panel | bargauge.Panel | statetimeline.Panel | stat.Panel


def text_of(page: Page) -> str:
    """Return the JSON file of a dashboard."""
    made = _dashboard(page).build()
    assert made.templating is not None, "every page has variables"
    for variable in made.templating.list_val or []:
        # Grafana's schema allows these fields only in interval variables.
        variable.auto = variable.auto_count = variable.auto_min = None
    return json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard(page: Page) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(page.title)
        .uid(f"tidemill-{page.name}")
        .description(page.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh(REFRESH)
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("Tidemill")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)  # The library has no keyword.
            .include_vars(True)  # The library has no keyword.
            .keep_time(True)  # The library has no keyword.
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name in _VARIABLES:
        is_shown = {"topic": page.has_topics, "consumer_group": page.has_groups}.get(name, True)
        made.with_variable(_variable(name, is_shown=is_shown))
    ids = itertools.count(1)
    for row in page.rows:
        made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made.with_panel(_panel(panel).id(next(ids)))
    return made


def _variable(name: str, *, is_shown: bool) -> dashboard.QueryVariable:
    label, query = _VARIABLES[name]
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .hide(VariableHide.DONT_HIDE if is_shown else VariableHide.HIDE_VARIABLE)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)  # The library has no keyword.
        .include_all(True)  # The library has no keyword.
        .all_value(ALL)
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _panel(panel: Panel) -> _Panel:
    made = _look(panel)
    made.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit)
    width, height = _NUMBER_SIZE if panel.look is Look.NUMBER else _SIZE
    made.span(width).height(height)
    made.links(
        [
            dashboard.DashboardLink(f"Runbook: {alert}")
            .type(DashboardLinkType.LINK)
            .url(f"{RUNBOOKS_URL}/{alert}.md")
            .target_blank(True)  # The library has no keyword.
            for alert in panel.alerts
        ]
    )
    for ref_id, query in zip("ABCDEFGHIJ", panel.queries, strict=False):
        made.with_target(_target(query, ref_id, panel.look))
    return made


def _target(query: Query, ref_id: str, look: Look) -> prometheus.Dataquery:
    made = prometheus.Dataquery().ref_id(ref_id).datasource(SOURCE).expr(query.expression)
    if query.legend:
        made.legend_format(query.legend)
    if look in {Look.NUMBER, Look.BARS}:
        return made.instant()
    return made.range().format(
        PromQueryFormat.HEATMAP if look is Look.HEATMAP else PromQueryFormat.TIME_SERIES
    )


def _look(panel: Panel) -> _Panel:
    match panel.look:
        case Look.LINES | Look.STACKED:
            return _graph(is_stacked=panel.look is Look.STACKED)
        case Look.HEATMAP:
            return (
                heatmap.Panel()
                .color(
                    heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
                )
                .y_axis(heatmap.YAxisConfig().unit(panel.unit))
            )
        case Look.BARS:
            return bargauge.Panel().reduce_options(
                common.ReduceDataOptions().calcs(["lastNotNull"])
            )
        case Look.STATES:
            return statetimeline.Panel()
        case Look.NUMBER:
            return (
                stat.Panel()
                .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
                .graph_mode(BigValueGraphMode.NONE)
                .color_mode(BigValueColorMode.VALUE)
                .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
                .thresholds(_thresholds(panel))
            )


def _graph(*, is_stacked: bool) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .min(0)
        .show_points(VisibilityMode.NEVER)
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)  # The library has no keyword.
        )
    )
    if is_stacked:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    return made


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    first, ends = "green", [(panel.warns_at, "orange"), (panel.fails_at, "red")]
    if panel.good_from is not None:
        first, ends = "red", [(panel.good_from, "green")]
    steps = [Threshold(color=first)]
    steps += [Threshold(value=value, color=color) for value, color in ends if value is not None]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
