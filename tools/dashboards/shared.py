"""The parts that all dashboards are made of: variables, panels, layout.

Owns the look. Every panel says what good looks like and what to do otherwise, and has a unit.
A query names its job by `JOB` or `POOL`, so that the variables at the top hold for every panel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.models.common import StackingMode, TooltipDisplayMode, VisibilityMode, VizOrientation
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
JOB = 'namespace=~"$namespace",rljob=~"$job"'
"""Matchers of everything that processes of a job export."""
POOL = f'{JOB},pool=~"$pool"'
"""The same, of generators of the chosen pools."""
RANGE = "$__rate_interval"
_HEIGHT = 8
_REFS = "ABCDEFGHIJ"
TAG = "streamrl"
_COLOURS = {
    "busy": "green",
    "pipeline no_samples": "red",
    "pipeline scoring": "light-red",
    "pipeline due_group": "dark-red",
    "pipeline staleness": "orange",
    "pipeline back_pressure": "dark-orange",
    "pipeline no_prompts": "yellow",
    "pipeline phase": "dark-yellow",
    "weights": "blue",
    "skew": "purple",
    "other": "#8e8e8e",
}
"""The same part and cause have the same colour everywhere, and no two share one."""

Panel = bargauge.Panel | heatmap.Panel | stat.Panel | statushistory.Panel | table.Panel | timeseries.Panel
_P = TypeVar("_P", bargauge.Panel, heatmap.Panel, stat.Panel, statushistory.Panel, table.Panel, timeseries.Panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression and the name of its series."""

    expr: str
    legend: str = "__auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The text behind a panel's title: how it looks when all is well, and what to do when it does not."""

    good: str
    otherwise: str

    def __str__(self) -> str:
        return f"Good: {self.good} Otherwise: {self.otherwise}"


def curves(title: str, *queries: Query, says: Advice, unit: str = "short", width: int = 12) -> timeseries.Panel:
    """Lines over time."""
    panel = _common(timeseries.Panel(), title, *queries, says=says, unit=unit, width=width)
    panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)).fill_opacity(0).line_width(2)
    return panel.axis_soft_min(0) if unit == "percentunit" else panel


def shares(title: str, *queries: Query, says: Advice, width: int = 12) -> timeseries.Panel:
    """Shares of one whole, upon each other: they reach 100 %."""
    return coloured(stacked(title, *queries, says=says, unit="percentunit", width=width)).min(0).max(1)


def coloured(panel: _P) -> _P:
    """With the colours of the parts of bubbles; a role may stand before them."""
    for part, colour in _COLOURS.items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        panel.override_by_regexp(f"/^(\\w+ )?{part}/", [DynamicConfigValue(id_val="color", value=fixed)])
    return panel


def stacked(title: str, *queries: Query, says: Advice, unit: str, width: int = 12) -> timeseries.Panel:
    """Areas upon each other: their sum counts."""
    panel = curves(title, *queries, says=says, unit=unit, width=width)
    return panel.fill_opacity(70).line_width(0).stacking(common.StackingConfig().mode(StackingMode.NORMAL))


def number(title: str, query: Query, *, says: Advice, unit: str = "short", width: int = 4) -> stat.Panel:
    """One figure: the latest."""
    panel = _common(stat.Panel(), title, query, says=says, unit=unit, width=width)
    return panel.height(_HEIGHT // 2).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def bars(title: str, query: Query, *, says: Advice, unit: str, width: int = 12) -> bargauge.Panel:
    """A bar for each series, over the whole time that is shown."""
    panel = _common(bargauge.Panel(), title, says=says, unit=unit, width=width)
    panel.with_target(_target("A", query).instant()).orientation(VizOrientation.HORIZONTAL).min(0)
    return panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def timeline(title: str, query: Query, *, says: Advice, width: int = 24) -> statushistory.Panel:
    """A line of cells for each series, from green at 0 to red at 1."""
    panel = _common(statushistory.Panel(), title, query, says=says, unit="percentunit", width=width)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_GR_YL_RD)).min(0).max(1)
    return panel.show_value(VisibilityMode.NEVER).max_data_points(120)


def heat(title: str, query: Query, *, says: Advice, unit: str, width: int = 12) -> heatmap.Panel:
    """A histogram's buckets (`le`) over time."""
    panel = _common(heatmap.Panel(), title, says=says, unit=unit, width=width)
    panel.with_target(_target("A", query).format(PromQueryFormat.HEATMAP)).calculate(calculate=False)
    panel.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
    return panel.y_axis(heatmap.YAxisConfig().unit(unit))


def rows(title: str, *queries: Query, says: Advice, units: Mapping[str, str], opens: str) -> table.Panel:
    """A table: a line for each job, a column for each query, named by its legend. `opens`: the dashboard behind a job's name."""
    panel = _common(table.Panel(), title, says=says, unit="short", width=24)
    for ref, query in zip(_REFS, queries, strict=False):
        panel.with_target(_target(ref, query).format(PromQueryFormat.TABLE).instant())
    columns = {f"Value #{ref}": query.legend for ref, query in zip(_REFS, queries, strict=False)}
    shown = {"excludeByName": {"Time": True}, "renameByName": columns}
    panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=shown))
    for column, unit in units.items():
        panel.override_by_name(column, [DynamicConfigValue(id_val="unit", value=unit)])
    return panel.override_by_name("rljob", [DynamicConfigValue(id_val="links", value=[_link(opens)])])


def _link(uid: str) -> dict[str, str]:
    fields = "var-job=${__data.fields.rljob}&var-namespace=${__data.fields.namespace}"
    return {"title": "Open the job", "url": f"/d/{uid}?{fields}&${{__url_time_range}}&${{datasource:queryparam}}"}


def _target(ref: str, query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).ref_id(ref).expr(query.expr).legend_format(query.legend)


def _common(panel: _P, title: str, *queries: Query, says: Advice, unit: str, width: int) -> _P:
    panel.title(title).description(str(says)).datasource(SOURCE).unit(unit).span(width).height(_HEIGHT)
    for ref, query in zip(_REFS, queries, strict=False):
        panel.with_target(_target(ref, query))
    return panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A variable at the top of a dashboard: the values of a label of a metric."""

    name: str
    metric: str
    label: str
    several: bool = True


NAMESPACE = Choice(name="namespace", metric="streamrl_step", label="namespace")
JOBS = Choice(name="job", metric='streamrl_step{namespace=~"$namespace"}', label="rljob")
ONE_JOB = replace(JOBS, several=False)
POOLS = Choice(name="pool", metric=f"streamrl_generators{{{JOB}}}", label="pool")


def board(
    uid: str, title: str, *, says: str, choices: Sequence[Choice], sections: Mapping[str, Sequence[Panel]]
) -> dashboard.Dashboard:
    """A dashboard: its variables, and its rows of panels."""
    made = dashboard.Dashboard(title).uid(uid).description(says).tags([TAG]).readonly()
    made.refresh("30s").time("now-1h", "now").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    made.link(
        dashboard.DashboardLink("StreamRL")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(as_dropdown=True)
        .keep_time(keep_time=True)
        .include_vars(include_vars=True)
    )
    made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for choice in choices:
        made.with_variable(_variable(choice))
    ids = count(1)
    for section, panels in sections.items():
        made.with_row(dashboard.Row(section).id(next(ids)))
        for panel in panels:
            made.with_panel(panel.id(next(ids)))
    return made


def _variable(choice: Choice) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(choice.name).label(choice.name.capitalize()).datasource(SOURCE)
    made.query(f"label_values({choice.metric}, {choice.label})").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    made.sort(VariableSort.ALPHABETICAL_ASC)
    return made.multi(multi=True).include_all(include_all=True).all_value(".*") if choice.several else made
