"""A process's metrics are its table: complete from the start, and nothing else can be written."""

import math
import re
from pathlib import Path

import pytest

from streamrl.metrics import (
    GENERATOR,
    OPERATOR,
    SCHEDULER,
    TABLES,
    TRAINER,
    TRAINER_RANK,
    WORKER_LABELS,
    MetricTable,
    worker_labels,
)
from streamrl.spec.rljob import Metadata
from streamrl_pages.metrics import MetricSet
from support.metric_pages import families, mistakes, series
from support.tree import ROOT

WORKERS = {"scheduler": SCHEDULER, "generator": GENERATOR, "trainer": TRAINER, "trainer rank": TRAINER_RANK}
TEXTS = [
    ROOT / "helm/streamrl/files/rules.yaml",
    *sorted(ROOT.glob("helm/streamrl/files/dashboards/*.json")),
    ROOT / "docs/runbooks.md",
]
LABELS = worker_labels(Metadata(name="sums", namespace="ml"), role="generator", process="generator-a-0", pool="a")


@pytest.mark.parametrize("table", [*WORKERS.values(), OPERATOR], ids=[*WORKERS, "operator"])
def test_everything_is_there_from_the_start(table: MetricTable) -> None:
    common = {} if table is OPERATOR else LABELS
    assert list(mistakes(MetricSet(table, common=common).render(), table)) == []


@pytest.mark.parametrize("table", WORKERS.values(), ids=WORKERS)
def test_counters_begin_with_zeros_and_gauges_with_nothing(table: MetricTable) -> None:
    found = families(MetricSet(table, common=LABELS).render())
    for spec in table.specs.values():
        values = {sample.value for sample in found[spec.name].samples}
        if spec.by:
            assert not values, "its writer knows the values of its labels"
        elif spec.type == "gauge":
            assert [math.isnan(value) for value in values] == [True]
        else:
            assert values == {0.0}


def test_names_follow_prometheus() -> None:
    for spec in (spec for table in TABLES for spec in table.specs.values()):
        assert spec.name.startswith("streamrl_")
        assert spec.name.endswith("_total") == (spec.type == "counter")
        stem = spec.name.removesuffix("_total")
        if spec.unit in ("seconds", "bytes", "ratio", "nats"):
            assert stem.endswith(f"_{spec.unit}"), spec.name
        assert bool(spec.buckets) == (spec.type == "histogram")
        assert list(spec.buckets) == sorted(spec.buckets)
        assert spec.text.endswith(".")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_alerts_dashboards_and_runbooks_name_metrics_that_there_are(path: Path) -> None:
    """Queries and sentences alike."""
    specs = [spec for table in TABLES for spec in table.specs.values()]
    histograms = [spec.name for spec in specs if spec.type == "histogram"]
    known = {spec.name for spec in specs} | {
        f"{name}_{part}" for name in histograms for part in ("sum", "count", "bucket")
    }
    found = set(re.findall(r"\bstreamrl_\w+", path.read_text(encoding="utf-8")))
    assert found
    assert sorted(found - known) == []


def test_every_series_of_a_worker_says_where_it_belongs() -> None:
    for table in WORKERS.values():
        assert all(set(WORKER_LABELS) <= set(spec.labels) for spec in table.specs.values())
    local = worker_labels(Metadata(name="sums"), role="scheduler", process="scheduler")
    assert (local["namespace"], local["pool"]) == ("local", "")


def test_a_pool_of_its_own_stands_in_the_place_of_the_processs() -> None:
    metrics = MetricSet(SCHEDULER, common=LABELS | {"pool": ""})
    metrics.set("generators", 3, "b")
    assert series(metrics.render(), "streamrl_generators", pool="b", rljob="sums") == 3


def test_a_counter_follows_a_cumulative_number_and_never_falls() -> None:
    metrics = MetricSet(GENERATOR, common=LABELS)
    found = []
    for total in (5, 5, 3, 8):
        metrics.total("generator_tokens", total)
        found.append(series(metrics.render(), "streamrl_generator_tokens_total"))
    assert found == [5, 5, 5, 8]


def test_what_is_replaced_leaves_nothing_behind() -> None:
    metrics = MetricSet(OPERATOR)
    metrics.replace("pool_scale_events", {("ml", "sums", "a", "up"): 2.0})
    metrics.replace("pool_scale_events", {("ml", "other", "a", "up"): 1.0})
    (sample,) = families(metrics.render())["streamrl_pool_scale_events_total"].samples
    assert (sample.labels["rljob"], sample.value) == ("other", 1.0)


@pytest.mark.parametrize(("name", "by"), [("no_such", ()), ("generators", ()), ("generators", ("a", "b"))])
def test_what_the_table_does_not_have_cannot_be_written(name: str, by: tuple[str, ...]) -> None:
    with pytest.raises((KeyError, ValueError)):
        MetricSet(SCHEDULER, common=LABELS).set(name, 1.0, *by)
