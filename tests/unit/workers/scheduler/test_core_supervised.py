"""Supervised jobs in the core: held-out rows reach the trainer behind its welcome, and nobody waits for generators that do not come."""

from collections import deque
from dataclasses import replace

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.evaluation import PATIENCE_LEASES
from streamrl_workers.scheduler.records import Recovered
from streamrl_workers.tasks.values import NeedPrompts, Reference
from support.core_events import joined
from support.core_rows import prompts_of
from support.core_world import World, settings


def supervised(**changes) -> World:
    """Its trainer has said hello; its attempt is durable, and no prompt has come."""
    run = joined(generators=0, **{"supervised": True, "group_size": 1, "staleness": 0, **changes})
    run.commit(len(run.unsynced))
    return run


def hear(run: World) -> list[str]:
    """Kinds of what the trainer was told."""
    kinds = [command.WhichOneof("command") for command in run.trainer.inbox]
    while run.trainer.inbox:
        run.deliver_trainer()
    return kinds


def deliver(run: World, split: str) -> None:
    """The task pool answers what it was asked for of this split."""
    run.prompts = deque(sorted(run.prompts, key=lambda need: need.split != split))
    while run.prompts and run.prompts[0].split == split:
        run.deliver_prompts()


def test_a_new_trainer_is_welcome_before_its_held_out_rows_are_there() -> None:
    run = supervised(evaluation_prompts=5)
    assert run.trainer.inbox[0].welcome.held_out_samples == 5
    assert "held_out" not in hear(run)
    deliver(run, "held_out")
    assert hear(run).count("held_out") == 1
    assert len(run.trainer.held_out) == 5


@pytest.mark.parametrize("taken", [0, 1])
def test_over_every_connection_the_welcome_is_at_once_and_the_rows_follow(taken: int) -> None:
    run = supervised(evaluation_prompts=2, evaluates=False)
    for _ in range(20 * taken):
        run.progress_once()
    assert (run.trainer.step > 0) == bool(taken)
    run.boot()
    run.join_trainer()
    assert run.trainer.inbox[0].HasField("welcome")
    assert "held_out" not in hear(run)
    deliver(run, "held_out")
    assert hear(run).count("held_out") == 1
    run.run_out()


def test_rows_that_are_too_many_bytes_end_the_run_with_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl_workers.scheduler.extensions.supervised.MOST_BYTES", 10)
    run = supervised(evaluation_prompts=2)
    deliver(run, "held_out")
    assert run.failed.startswith("spec.task.evaluation.maxPrompts: the held-out rows must have at most 10 bytes")


def test_too_many_bytes_end_the_run_before_the_other_rows_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl_workers.scheduler.extensions.supervised.MOST_BYTES", 10)
    run = supervised(evaluation_prompts=100)
    first = NeedPrompts(split="held_out", first_index=0, count=1)
    run.do(run.core.prompts_arrived(prompts_of(first, supervised=True)))
    assert run.failed.startswith("spec.task.evaluation.maxPrompts: the held-out rows must have at most 10 bytes")


def test_a_job_of_another_kind_has_no_rows() -> None:
    run = supervised(supervised=False, evaluation_prompts=2)
    deliver(run, "held_out")
    assert run.trainer.inbox[0].welcome.held_out_samples == 0
    assert "held_out" not in hear(run)


def test_an_evaluation_that_no_generator_makes_counts_as_failed_and_training_goes_on() -> None:
    run = supervised(evaluation_prompts=2)
    for _ in range(20):
        run.progress_once()
    assert run.trainer.step == 0
    run.do(run.core.tick(run.now_s))
    run.now_s += (PATIENCE_LEASES + 1) * run.job.lease_s
    run.do(run.core.tick(run.now_s))
    for _ in range(20):
        run.progress_once()
    assert run.trainer.step == run.job.evaluation.interval
    assert run.core.last_evaluation.failed == 2


def test_versions_that_nobody_is_to_have_are_forgotten_but_for_the_newest() -> None:
    announcer = Core(settings(supervised=True, group_size=1, staleness=0, evaluates=False), Recovered())._weights
    for step in range(100):
        announcer.published(pb.VersionName(attempt=1, step=step, hash=b"h"), address="h:1")
        announcer.advance(recorded_steps=step)
    assert [step for step in range(100) if announcer.hash_of(step)] == [99]


def test_the_archive_has_what_the_row_answers_beside_its_prompt() -> None:
    run = supervised(evaluation_prompts=0, archived_percent=100)
    need = run.prompts.popleft()
    prompts = [replace(one, reference=Reference("4", '{"level": 1}')) for one in prompts_of(need, supervised=True)]
    run.do(run.core.prompts_arrived(prompts))
    (texts, *_) = [write.record.texts for write in run.unsynced if isinstance(write.record, rec.Scored)]
    stored = pb.GroupTexts.FromString(texts)
    assert (stored.prompt, stored.answer, stored.metadata) == (prompts[0].text, "4", '{"level": 1}')
