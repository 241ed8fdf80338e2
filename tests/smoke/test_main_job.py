"""The main job, small but real: scratch model, torch trainer, hf engine, report, export, generate. One run serves all tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl_cli.jobfile import load_job
from support.runs import LocalRun, streamrl

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
STEPS = 6
PROCESSES = ("trainer", "generator-local")
SMALL = [
    f"spec.pipeline.steps={STEPS}",
    "spec.pipeline.batchGroups=8",
    "spec.model.scratch.warmUp.steps=40",
    "spec.task.evaluation.maxPrompts=16",
    "spec.task.evaluation.intervalSteps=3",
    "spec.storage.checkpoints.intervalSteps=2",
]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """Run the example with everything small; user functions are found beside the example."""
    base = tmp_path_factory.mktemp("torch")
    job = load_job(EXAMPLE, overrides=SMALL).model_dump(mode="json", by_alias=True, exclude_none=True)
    for module in EXAMPLE.parent.glob("*.py"):
        (base / module.name).write_text(module.read_text())
    made = LocalRun.start(job, folder=base / "run", base_dir=base)
    assert made.process.wait(390) == 0, made.logs()
    yield made


def test_it_ends_with_all_steps_and_an_exact_journal(run: LocalRun) -> None:
    assert run.steps() == STEPS
    assert run.result()["status"] == "succeeded"
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr


def test_it_evaluates_at_the_start_at_intervals_and_at_the_end(run: LocalRun) -> None:
    lines = (run.folder / "metrics" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 3, 6]


def test_staleness_is_within_the_bound(run: LocalRun) -> None:
    lines = (run.folder / "metrics" / "steps.jsonl").read_text().splitlines()
    assert max(json.loads(line)["staleness_max"] for line in lines) <= 1


def test_bubble_parts_add_up_to_the_wall_for_every_process(run: LocalRun) -> None:
    for file in (run.folder / "metrics").glob("[gt]*-0.jsonl"):
        last = json.loads(file.read_text().splitlines()[-1])
        assert sum(last["parts"].values()) == pytest.approx(last["wall_s"], rel=0.01), file.name


def test_stalls_of_each_version_are_told_by_part(run: LocalRun) -> None:
    lines = [json.loads(line) for line in (run.folder / "metrics" / "steps.jsonl").read_text().splitlines()]
    assert all(line["trainer"]["weights_copy_seconds"] > 0 for line in lines)
    loads = [line["weights"] for line in lines]
    assert sum(load["loads"] for load in loads) >= 2, "the first version, and later ones"
    for part in ("pull_seconds", "load_seconds", "cache_seconds"):
        assert sum(load[part] for load in loads) > 0
    end = json.loads((run.folder / "metrics" / "trainer-0.jsonl").read_text().splitlines()[-1])
    stalled = sum(line["trainer"][f"weights_{part}_seconds"] for line in lines for part in ("copy", "wait"))
    assert stalled <= end["parts"]["weights"] + 0.01, "the trainer's part of its wall"


def test_the_trained_model_answers(run: LocalRun) -> None:
    done = streamrl("generate", "--checkpoint", str(run.folder), "--prompt", "1+2=", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1+2=")


def test_the_report_is_one_self_contained_page(run: LocalRun) -> None:
    done = streamrl("report", str(run.folder))
    page = (run.folder / "report.html").read_text()
    assert done.stdout.strip().endswith("report.html")
    assert "Plotly.react" in page
    assert len(page.encode()) < 2_000_000
    assert 'src="http' not in page
    for process in PROCESSES:
        assert f"{process}-0" in page
    assert page.count("<td>pool local, estimated</td>") == page.count("<td>generators</td>") == 1
