"""Groups of turns that are drawn anew at states of earlier samples: what is asked, what is delivered, how many, over restarts."""

from random import Random

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from support import core_trainer
from support.core_events import commands, joined
from support.core_rows import prompt_text
from support.core_world import World
from support.turns import states_of, tokens_of

SHARE = 50


def played(**changes) -> World:
    """A run whose trainer has said hello."""
    return joined(**{"resampled_percent": SHARE, "max_turns": 3, "steps": 6, "batch_groups": 4, **changes})


def scored(run: World) -> list[list[pb.Sample]]:
    """The samples of each group that was."""
    records = [record for record in run.durable if isinstance(record, rec.Scored)]
    return [[pb.Sample.FromString(data) for data in record.trajectories] for record in records]


def test_half_of_the_groups_of_a_run_are_turns_drawn_anew():
    run, chance = played(staleness=0), Random(1)
    requests: list[pb.SampleRequest] = []
    while run.trainer.step < 6:
        for generator in run.generators.values():
            requests += [one for command in generator.inbox for one in command.issue.items]
        run.progress_some(chance, pace=1.0, finish=0.5)
    resampled = [samples for samples in scored(run) if samples[0].resampled]
    assert len(resampled) == 5 * 4 * SHARE // 100  # none in the first step
    for samples in resampled:
        asked = [one for one in requests if one.group_id == samples[0].group_id]
        assert {one.sample_index for one in asked} == {0, 1}
        before = {one.prefix_tokens[: 4 * one.context_tokens] for one in asked}
        (prompt,) = {one.prompt for one in asked}
        assert {sample.prompt_tokens for sample in samples} == {tokens_of(prompt) + tokens for tokens in before}
        assert not any(sample.segments or sample.HasField("reward") for sample in samples)
    assert len({len(samples[0].prompt_tokens) for samples in resampled}) > 1


def test_nobody_rewards_or_answers_them_and_they_are_no_failures():
    run = played(staleness=0)
    run.run_out()
    asked = {record.group_id for record in run.durable if isinstance(record, rec.Planned) and record.prompt_key == 0}
    assert asked
    dropped = [record for record in run.durable if isinstance(record, rec.Dropped)]
    assert dropped == []
    assert asked == {samples[0].group_id for samples in scored(run) if samples[0].resampled}
    assert not run.core.view().score_failures
    stats = run.core.last_step.stats
    assert stats.samples - stats.reward_count == stats.unrewarded > 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_scheduler_that_starts_again_makes_such_groups_of_their_prompts(staleness):
    """All else, exactly once and staleness, is checked by the world. Each played sample is one of the prompt of its group's number."""
    run = played(staleness=staleness)
    while run.trainer.step < 2:
        run.progress_once()
    run.boot()
    run.join_trainer()
    for name in list(run.generators):
        run.join_generator(name)
    run.run_out()
    assert run.finished
    assert not [record for record in run.durable if isinstance(record, rec.Dropped)]
    games = [sample for samples in scored(run) for sample in samples if not sample.resampled]
    assert all(sample.prompt_tokens == tokens_of(prompt_text(sample.group_id)) for sample in games)


def test_behind_another_prompt_than_the_states_there_is_no_turn(monkeypatch):
    others = [pb.TurnState(prompt_index=0, tokens=bytes(4), prompt_hash=b"another")] * 2
    monkeypatch.setattr(core_trainer, "states_of", lambda held, *, job: others if 0 in held else [])
    run = played(staleness=0)
    run.run_out()
    dropped = [record for record in run.durable if isinstance(record, rec.Dropped)]
    assert [record.reason for record in dropped] == ["generation_failed"] * 2


def test_what_waits_is_of_the_newest_steps_and_what_is_scored_is_not_kept(monkeypatch):
    """Two of each step's four groups: states of two steps wait at staleness 0."""
    monkeypatch.setattr(
        core_trainer, "states_of", lambda held, *, job: 9 * states_of(held, job=job) if 0 in held else []
    )
    run = played(staleness=0)
    run.run_out()
    assert sum(samples[0].resampled for samples in scored(run)) == 2 * 2


@pytest.mark.parametrize(
    "state", [pb.TurnState(prompt_index=10**6), pb.TurnState(tokens=b"abc"), pb.TurnState(tokens=b"\xff" * 4)]
)
def test_a_state_that_is_none_sends_the_trainer_back(state):
    run, chance = played(), Random(2)
    for _ in range(500):
        if not run.can_take_step():
            run.progress_some(chance, pace=0.5, finish=0.5)
    held = run.trainer.held
    done = pb.StepDone(step=0, group_ids=list(held), states=[*states_of(held, job=run.job), state])
    (restart,) = commands(run.core.step_done(done), "restart")
    assert restart.reason == "step 0 names a state that no group had"
