"""The model behind the paper's tables: what its rule gives, and that it computes what it says."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_cli.simulation.reading import parse_scenario
from streamrl_workers.scheduler import planning

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NAMES = ("rule", "profile", "calibration", "measured", "facts", "svg", "tables", "holdout", "runs", "resources")


@pytest.fixture(scope="module")
def paper() -> Iterator[Any]:
    """The package, whose folder is not on the path."""
    sys.path.insert(0, str(BENCHMARKS))
    package = ModuleType("modules")
    for name in NAMES:
        setattr(package, name, import_module(f"paper.{name}"))
    yield package
    sys.path.remove(str(BENCHMARKS))


def test_lengths_have_the_mode_and_the_limit_of_the_paper(paper: Any) -> None:
    lengths = paper.rule.Lengths.of("20K")
    batch = lengths.batch
    assert len(batch) * paper.rule.GROUP == paper.facts.BATCH
    assert batch[-1] == pytest.approx(20_000, abs=2)
    assert 2000 <= lengths.median_tokens * 2.718281828 ** -(lengths.sigma**2) <= 3000
    assert paper.rule.Lengths.of("5K").batch[-1] == pytest.approx(5_000, abs=2)


@pytest.mark.parametrize(("model", "gpus"), [("7B", 1), ("32B", 4), ("72B", 8)])
def test_an_instance_holds_its_samples_at_their_longest(paper: Any, model: str, gpus: int) -> None:
    rule = paper.rule
    one = rule.QWEN[model]
    assert rule.instance_gpus(one) == gpus
    slots = rule.instance_slots(one, longest_tokens=20_000, knobs=rule.RULE)
    used = one.weight_bytes + slots * one.kv_bytes * (20_000 + rule.PROMPT_TOKENS)
    memory = rule.USABLE_MEMORY * rule.H800.memory_bytes * gpus
    assert used <= memory < used + one.kv_bytes * (20_000 + rule.PROMPT_TOKENS)


@pytest.mark.parametrize("context", [0, 1024, 2048])
def test_the_curve_without_its_context_gives_the_papers_back_where_nothing_is_cut(paper: Any, context: int) -> None:
    rule = paper.rule
    knobs = rule.Knobs(context_tokens=context)
    points = rule.latency_points(scale=2.0, knobs=knobs)
    added = [2e3 * rule.kv_seconds() * context * point["batch"] for point in points]
    for point, more, paper_ms in zip(points, added, paper.facts.PTL_MS.values(), strict=True):
        assert point["milliseconds"] + more >= 2 * paper_ms - 1e-9
    assert points[-1]["milliseconds"] + added[-1] == pytest.approx(2 * 36.9)
    assert [p["milliseconds"] for p in points] == sorted(p["milliseconds"] for p in points)


def test_first_in_first_out_is_exact_where_all_fit(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = paper.profile.Case(model="7B", lengths=paper.rule.Lengths.of("5K"), gpus=1)
    monkeypatch.setattr(paper.profile, "kv_seconds", lambda _: 0.0)
    curve = LatencyCurve.of_milliseconds((p["batch"], p["milliseconds"]) for p in case.points())
    lengths = [500, 30, 4000, 900, 900]
    assert paper.profile.fifo_seconds(case, lengths) == pytest.approx(replica_seconds(curve, lengths))


def test_least_squares_is_over_relative_errors(paper: Any) -> None:
    x = paper.calibration._factor([1.0, 10.0], [1.0, 2.0], [3.0, 52.0])
    errors = [(1.0 * x + 1.0) / 3.0 - 1, (10.0 * x + 2.0) / 52.0 - 1]
    for other in (x - 0.01, x + 0.01):
        others = [(1.0 * other + 1.0) / 3.0 - 1, (10.0 * other + 2.0) / 52.0 - 1]
        assert sum(e * e for e in errors) < sum(e * e for e in others)


def test_runs_plan_a_batch_whole_and_leave_the_scheduler_as_it_was(paper: Any, tmp_path: Path) -> None:
    rule, before = paper.rule, planning.PORTION
    case = paper.profile.Case(model="7B", lengths=rule.Lengths.of("5K"), gpus=8)
    document = paper.profile.scenario(case, mode="StreamSync", dispatch="longestFirst", steps=1)
    document["lengths"]["table"]["rows"] = [[64]] * 512
    results = paper.measured.Results(tmp_path / "runs.json")
    first = results.run(document)
    assert planning.PORTION == before != 512
    again = paper.measured.Results(tmp_path / "runs.json")
    assert again.run(document) == first
    assert (results.runs, again.runs) == (1, 0)
    assert parse_scenario(document).pools[0].scaling.initial == 8


def test_algorithm_1_chooses_as_the_paper_on_the_papers_points(paper: Any) -> None:
    rows = list(paper.resources.from_the_papers_points())
    assert [row.sizes for row in rows] == [row.paper for row in rows]
    assert [row.gain for row in rows] == pytest.approx([1.25, 1 / 0.83])


def test_plots_are_xml_with_a_bar_for_each_value(paper: Any) -> None:
    text = paper.svg.bars("a < b", ["x", "y"], {"paper": [1.0, 2.0], "ours": [1.5, 2.5]})
    rects = ElementTree.fromstring(text).findall("{http://www.w3.org/2000/svg}rect")
    assert len(rects) == 1 + 2 + 4  # the ground, the legend, the bars
    stairs = paper.svg.stairs("t", {"ours": [(0.0, 32.0), (9.0, 40.0)]}, end=30.0, x_title="iteration")
    assert ElementTree.fromstring(stairs).find("{http://www.w3.org/2000/svg}polyline") is not None


def test_errors_name_the_worst(paper: Any) -> None:
    cells = [paper.holdout.Cell(table="t", name=n, paper=1.0, ours=o) for n, o in (("a", 1.1), ("b", 0.5))]
    text = paper.tables.errors(cells, mean=0.15, most=0.3)
    assert "mean error 30.0%" in text
    assert "largest 50% (t, b;" in text
    assert text.endswith("limit: 1.")
