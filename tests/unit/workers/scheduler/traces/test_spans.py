"""Spans of groups and versions where something goes another way than straight on."""

from itertools import count
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamrl.errors import UserError
from streamrl.keys import FILE_TRACE
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_job
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.evaluation import GROUP_BASE
from streamrl_workers.scheduler.records import Planned, Recovered, StepTaken
from streamrl_workers.scheduler.traces.group_spans import GroupSpans
from streamrl_workers.scheduler.traces.tracer import Tracer, run_number
from streamrl_workers.scheduler.traces.version_spans import VersionSpans
from streamrl_workers.tasks.values import Score, ScoreSample
from streamrl_workers.tracing.otlp import SpanSender
from streamrl_workers.tracing.spans import NS, TraceSpan
from support.jobs import simulated_job

STEP = StepTaken(attempt=1, step=3, group_ids=(7,), metrics={"step_seconds": 2.0})


class Told:
    """Groups by a clock that goes on by a second each time that it is asked."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []
        clock = (second * NS for second in count())
        self.groups = GroupSpans("run", share_percent=100, requests={}, put=self.spans.extend, clock=clock.__next__)
        self.versions = VersionSpans("run", put=self.spans.extend, clock=clock.__next__)

    def issue(self, generator_id: str, lease: int, *, group_id: int = 7) -> pb.SampleRequest:
        request = pb.SampleRequest(lease=lease, group_id=group_id)
        self.groups.issued(generator_id, request)
        return request

    def progress(self, generator_id: str, lease: int, *spans: tuple[int, int], end: str = "") -> None:
        versions = [pb.VersionSpan(tokens=tokens, step=step, attempt=1) for tokens, step in spans]
        item = pb.Progress(lease=lease, spans=versions, finish_reason=end, generate_s=0.5)
        self.groups.progressed(generator_id, [item])

    def score(self) -> None:
        self.groups.asked(ScoreSample(group_id=7, sample_index=0, split="train", prompt_index=0, completion=""))
        self.groups.answered(Score(group_id=7, sample_index=0, reward=1.0, parts={}))

    def named(self, name: str) -> list[TraceSpan]:
        return [span for span in self.spans if span.name == name]


def test_a_moved_sample_has_a_generation_at_each_generator() -> None:
    told = Told()
    told.groups.planned(7, prompt_index=2)
    first = told.issue("a", 1)
    told.progress("a", 1, (4, 0))
    told.groups.cancelled([1, 99])
    told.issue("b", 2)
    told.progress("a", 2, (9, 9))  # not of this generator
    told.progress("b", 2, (3, 0), (2, 1))
    told.progress("b", 2, (1, 1), end="stop")
    told.score()
    assert told.spans == [], "nothing before the end"
    told.groups.ended(7, outcome="zero_variance")
    generations = [(span.process, span.attributes["streamrl.outcome"]) for span in told.named("generate")]
    assert generations == [("a", "cancelled"), ("b", "finished")]
    policies = [(span.process, span.attributes["streamrl.tokens"]) for span in told.named("policy")]
    assert policies == [("a", 4), ("b", 3), ("b", 3)]
    assert told.named("group")[0].attributes["streamrl.outcome"] == "zero_variance"
    assert first.traceparent == f"00-{told.spans[0].id.trace:032x}-{told.named('generate')[0].id.span:016x}-01"


def test_what_a_generator_held_is_lost_with_it_and_what_was_open_ends_with_the_group() -> None:
    told = Told()
    told.groups.planned(7, prompt_index=0)
    told.issue("a", 1)
    told.groups.left("a")
    told.issue("b", 2)
    told.groups.end_all(outcome="run_ended")
    outcomes = {span.process: (span.attributes["streamrl.outcome"], span.error) for span in told.named("generate")}
    assert outcomes == {"a": ("lost", "its generator has left"), "b": ("cancelled", "")}
    assert len(told.named("sample")) == 1


def test_a_group_that_a_trainer_lost_is_trained_by_the_next_and_told_once() -> None:
    told = Told()
    told.groups.delivered(7)
    told.groups.delivered(7)
    told.groups.stepped(STEP)
    assert [span.error for span in told.named("train")] == ["the trainer did not keep it", ""]
    assert told.named("train")[1].attributes["streamrl.step.seconds"] == 2.0
    assert told.named("group")[0].attributes["streamrl.resumed"] is True
    told.groups.delivered(7)  # the step is taken again
    told.groups.stepped(STEP)
    assert len(told.named("group")) == 1
    told.groups.settled(4)
    assert told.groups.trained == {}


def test_held_out_samples_are_not_traced() -> None:
    told = Told()
    assert told.issue("a", 1, group_id=GROUP_BASE).traceparent == ""


def test_a_version_lasts_until_nobody_loads_it() -> None:
    told = Told()
    versions = [pb.VersionName(attempt=1, step=step) for step in range(3)]
    told.versions.published(pb.Published(version=versions[0]))
    for generator_id in ("slow", "quick", "gone"):
        told.versions.told(generator_id, pb.WeightsAvailable(version=versions[0]))
    told.versions.loaded("quick", pb.WeightsLoaded(version=versions[0], fetch_s=0.25, waited_s=0.5, load_s=0.125))
    told.versions.published(pb.Published(version=versions[0]))  # its connection broke
    told.versions.published(pb.Published(version=versions[1]))
    told.versions.told("slow", pb.WeightsAvailable(version=versions[1]))
    told.versions.failed("gone", versions[0], error="corrupt")
    assert told.spans == []
    told.versions.left("gone")
    told.versions.loaded("slow", pb.WeightsLoaded(version=versions[1], fetch_s=100))  # and never version 0
    (root,) = told.named("weights")
    assert root.attributes["streamrl.weights.version"] == 0
    loads = [(span.process, span.error) for span in told.named("load")]
    assert loads == [("quick", ""), ("gone", "corrupt")]
    lengths = {
        name: (told.named(name)[0].end_ns - told.named(name)[0].begin_ns) / NS for name in ("pull", "wait", "swap")
    }
    assert lengths == {"pull": 0.25, "wait": 0.5, "swap": 0.125}
    told.versions.end_all()
    slow = next(span for span in told.named("load") if span.process == "slow")
    pull = next(span for span in told.named("pull") if span.process == "slow")
    assert pull.begin_ns == slow.begin_ns, "what was measured reaches no further back than the order"


def test_a_mistake_of_ours_ends_tracing_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    document = simulated_job()
    document["spec"]["tracing"] = {"endpoint": "http://127.0.0.1:1/v1/traces", "sharePercent": 100}
    sender = SpanSender(InMemorySpanExporter(), endpoint="here", common={})
    tracer = Tracer(parse_job(document), run="run", recovered=Recovered(compositions={1: (7,)}), sender=sender)
    tracer.effects[fx.DeliverGroup](fx.DeliverGroup(group_id=7, step=1, trajectories=(), size_bytes=0))
    tracer.event("a", "no event")
    assert "nothing more is traced" in caplog.text
    tracer.effects[fx.Write](fx.Write(sequence=1, record=Planned(group_id=8, prompt_index=0)))
    tracer.effects[fx.Finished](fx.Finished(step=1))
    tracer.close()
    assert tracer.spans() == (0, 0)


def test_a_run_keeps_its_number(tmp_path: Path) -> None:
    run = run_number(tmp_path)
    assert (len(run), run_number(tmp_path)) == (32, run)
    (tmp_path / FILE_TRACE).write_text("[]")
    with pytest.raises(UserError, match=FILE_TRACE.replace(".", "[.]")):
        run_number(tmp_path)
