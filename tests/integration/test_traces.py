"""Traces of real runs: what a collector gets, and that one which takes nothing harms nobody."""

import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.otlp_collector import Collector, Received, assert_connected, collecting
from support.runs import LocalRun, streamrl
from support.trace_file import processes, read_trace

STEPS, BATCH, GROUP = 6, 4, 4
GENERATORS = {"generator-sim-0", "generator-sim-1"}
"""One that starts late makes nothing."""


def traced_job(endpoint: str, *, share_percent: int = 100, **changes: Any) -> dict[str, Any]:
    job = simulated_job(steps=STEPS, batch_groups=BATCH, **changes)
    job["spec"]["tracing"] = {"endpoint": endpoint, "sharePercent": share_percent}
    return job


def started(base: Path, job: dict[str, Any]) -> LocalRun:
    write_prompts(base / "prompts.jsonl")
    return LocalRun.start(job, folder=base / "run", base_dir=base)


def ended(run: LocalRun) -> None:
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    assert run.steps() == STEPS


def roots(collector: Collector, name: str) -> list[tuple[Received, list[Received]]]:
    found = [(assert_connected(spans), spans) for spans in collector.trees().values()]
    return [(root, spans) for root, spans in found if root.name == name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Collector, int]:
    """All that a run has sent, and when it was begun."""
    begun_ns = time.time_ns()
    with collecting() as collector:
        ended(started(tmp_path_factory.mktemp("whole"), traced_job(collector.endpoint)))
    return collector, begun_ns


def test_a_group_is_one_tree_through_all_processes(whole: tuple[Collector, int]) -> None:
    collector, begun_ns = whole
    trained = [one for one in roots(collector, "group") if one[0].attributes["streamrl.outcome"] == "trained"]
    assert Counter(root.attributes["streamrl.step"] for root, _ in trained) == dict.fromkeys(range(STEPS), BATCH)
    versions = {root.trace: root for root, _ in roots(collector, "weights")}
    for root, spans in trained:
        names = Counter(span.name for span in spans)
        assert (names["queue"], names["sample"], names["score"], names["ready"], names["train"]) == (
            1,
            GROUP,
            GROUP,
            1,
            1,
        )
        assert names["generate"] >= GROUP
        services = {"streamrl-scheduler", "streamrl-generator", "streamrl-rewards", "streamrl-trainer"}
        assert {span.service for span in spans} == services
        assert begun_ns <= root.begin_ns <= root.end_ns <= time.time_ns()
        assert_in_order(spans)
        assert_policies(spans, versions)


def assert_in_order(spans: list[Received]) -> None:
    """The stages of a life come one after the other."""
    (queue,), (ready,), (train,) = (
        [span for span in spans if span.name == name] for name in ("queue", "ready", "train")
    )
    scores = [span for span in spans if span.name == "score"]
    assert queue.end_ns <= min(span.begin_ns for span in spans if span.name == "generate")
    assert max(span.end_ns for span in scores) <= ready.begin_ns
    assert ready.end_ns <= train.begin_ns
    for score in scores:
        own = [span for span in spans if span.name == "generate" and span.parent == score.parent]
        assert max(span.end_ns for span in own) <= score.begin_ns


def assert_policies(spans: list[Received], versions: dict[str, Received]) -> None:
    """The tokens of a generation are those of its weight versions, each of which has a trace, and was published before."""
    for generate in (span for span in spans if span.name == "generate"):
        policies = [span for span in spans if span.parent == generate.span]
        tokens = generate.attributes["gen_ai.usage.output_tokens"]
        assert sum(span.attributes["streamrl.tokens"] for span in policies) == tokens > 0
        for policy in policies:
            version = versions[policy.links[0]]
            assert version.attributes["streamrl.weights.version"] == policy.attributes["streamrl.weights.version"]
            assert version.begin_ns <= policy.begin_ns


def test_a_weight_version_is_published_then_pulled_and_loaded_by_each_generator(whole: tuple[Collector, int]) -> None:
    collector, _ = whole
    versions = roots(collector, "weights")
    assert {root.attributes["streamrl.weights.version"] for root, _ in versions} == set(range(STEPS + 1))
    loads = Counter()
    for _, spans in versions:
        (publish,) = [span for span in spans if span.name == "publish"]
        for load in (span for span in spans if span.name == "load"):
            loads[load.process] += 1
            pull, wait, swap = (
                next(span for span in spans if span.name == name and span.parent == load.span)
                for name in ("pull", "wait", "swap")
            )
            assert publish.end_ns <= load.begin_ns <= pull.begin_ns
            assert (pull.end_ns, wait.end_ns, swap.end_ns) == (wait.begin_ns, swap.begin_ns, load.end_ns)
    assert loads
    assert set(loads) <= GENERATORS


@pytest.mark.soak
def test_a_run_is_drawn_for_perfetto(tmp_path: Path) -> None:
    """All samples, steps and versions; what each process did adds up to what it counted, by cause."""
    run = started(tmp_path, simulated_job(steps=STEPS, batch_groups=BATCH))
    ended(run)
    told = streamrl("report", str(run.folder), "--trace", str(tmp_path / "trace.json"))
    assert (told.returncode, told.stderr) == (0, ""), told
    events = read_trace(tmp_path / "trace.json")
    names = processes(events)
    spans = [event for event in events if event["ph"] == "X"]
    samples = [event for event in spans if "tokens" in event.get("args", {})]
    trained = Counter(event["args"]["step"] for event in samples if event["args"]["step"] is not None)
    assert trained == dict.fromkeys(range(STEPS), BATCH * GROUP)
    assert {names[event["pid"]] for event in samples} <= GENERATORS
    assert {event["name"] for event in spans if event["name"].startswith("step ")} == {
        f"step {n}" for n in range(STEPS)
    }
    assert sum(event["name"].startswith("version ") for event in events) == STEPS
    for number, name in names.items():
        parts = Counter()
        for event in spans:
            if (event["pid"], event["tid"]) == (number, 0):
                parts[event["name"]] += event["dur"] / 1e6
        last = next(line for line in reversed(run.walls()) if line["process"] == name)
        assert parts == pytest.approx({part: took_s for part, took_s in last["parts"].items() if took_s}, abs=1e-3)


def test_a_killed_scheduler_and_trainer_leave_no_orphan(tmp_path: Path) -> None:
    with collecting() as collector:
        job = traced_job(collector.endpoint)
        job["spec"]["storage"]["checkpoints"] = {"intervalSteps": 2}
        hold = Hold.on(job, tmp_path, step=3)
        run = started(tmp_path, job)
        run.wait_steps(3)
        run.kill_one("scheduler")
        run.kill_one("trainer-0")
        hold.let_go()
        ended(run)
    trained = {
        root.attributes["streamrl.group.id"]
        for root, _ in roots(collector, "group")
        if root.attributes["streamrl.outcome"] == "trained"
    }
    # A held run comes two steps further, and what its scheduler told in its last second dies with it.
    assert len(trained) >= (STEPS - 5) * BATCH


@pytest.mark.soak
def test_a_share_is_traced_and_none_sends_nothing(tmp_path: Path) -> None:
    with collecting() as collector:
        ended(started(tmp_path, traced_job(collector.endpoint, share_percent=0)))
        assert collector.requests == 0
        assert not (tmp_path / "run" / "trace.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["refuses", "hangs", "fails"])
def test_a_collector_that_takes_nothing_costs_one_warning(kind: str, tmp_path: Path) -> None:
    with collecting(status=400, hangs=kind == "hangs") as collector:
        endpoint = f"http://127.0.0.1:{_closed_port()}/v1/traces" if kind == "refuses" else collector.endpoint
        run = started(tmp_path, traced_job(endpoint))
        ended(run)
        assert (collector.requests > 0) == (kind != "refuses")
    told = (tmp_path / "run" / "logs" / "scheduler.log").read_text()
    assert told.count("spans are lost") == 1, told
    assert told.count("0 spans were sent") == 1, told
    assert "Traceback" not in told, told


def _closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
